"""Causes, each found by an experiment that changes one thing."""

from anybatch.proof.causes.explaining import explain

__all__ = ["explain"]
