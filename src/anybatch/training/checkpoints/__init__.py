"""What a run needs to go on, on disk."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.training.checkpoints.random_states import seed_all, seed_from_these
    from anybatch.training.checkpoints.saving import Positioned, Resumed, resume, save
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "Positioned",
    "Resumed",
    "resume",
    "save",
    "seed_all",
    "seed_from_these",
]
