"""Integrations into training frameworks. Each module needs its framework and is imported on demand:

from anybatch.integrations.huggingface import exact            # transformers, TRL, sentence-transformers
from anybatch.integrations.lightning import ExactStrategy
from anybatch.integrations.accelerate import prepared_update
"""
