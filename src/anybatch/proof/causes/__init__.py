"""Causes, each found by an experiment that changes one thing."""

from anybatch.proof.causes.explain import explain

__all__ = ["explain"]
