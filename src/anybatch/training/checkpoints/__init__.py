"""What a run needs to go on, on disk."""

from anybatch.training.checkpoints.checkpoint_files import seed_all, seed_rank
from anybatch.training.checkpoints.saving import PositionedLoader, Resumed, resume, save

__all__ = [
    "PositionedLoader",
    "Resumed",
    "resume",
    "save",
    "seed_all",
    "seed_rank",
]
