"""Ready-made objectives: several terms, observed units, Hugging Face models, contrastive losses."""

from anybatch.objectives.contrastive import InfoNCE, clip_loss, info_nce
from anybatch.objectives.huggingface import huggingface, label_units
from anybatch.objectives.observed import ObservedMeans, WatchedLoss, learned, observed
from anybatch.objectives.sentence_losses import sentence_transformers
from anybatch.objectives.terms import Terms
