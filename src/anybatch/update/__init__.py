"""The update in its one right order."""

from anybatch.update.one_update import Update, UpdateResult

__all__ = [
    "Update",
    "UpdateResult",
]
