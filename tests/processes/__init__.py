"""Processes that tests start: forked from one that has loaded torch, alone (`forked`) or as ranks that stay (`ranks`)."""
