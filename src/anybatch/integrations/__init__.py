"""Where people already train. One module each, imported on demand, because each needs its framework:

from anybatch.integrations.huggingface import exact            # transformers, TRL, sentence-transformers
from anybatch.integrations.lightning import ExactStrategy
from anybatch.integrations.accelerate import prepared_update
"""
