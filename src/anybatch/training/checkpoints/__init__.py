"""What a run needs to go on, on disk."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.training.checkpoints.checkpoint_files import seed_all, seed_rank
    from anybatch.training.checkpoints.saving import PositionedLoader, Resumed, resume, save
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "PositionedLoader",
    "Resumed",
    "resume",
    "save",
    "seed_all",
    "seed_rank",
]
