"""The update in its one right order."""

from anybatch.update.callbacks import OnUpdate
from anybatch.update.one_update import Update
from anybatch.update.result import UpdateResult

__all__ = ["OnUpdate", "Update", "UpdateResult"]
