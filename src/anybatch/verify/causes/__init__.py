"""Causes, each found by an experiment that changes one thing."""

from anybatch.verify.causes.explain import explain

__all__ = ["explain"]
