"""The numbers of every update as TensorBoard event files."""

from pathlib import Path

from anybatch.update import UpdateResult


class TensorBoardLogger:
    """Writes `result.scalars()` of every update into `folder`, numbered from `updates` + 1 on: how many were done before.

    After a resume, what a killed run had written beyond `updates` is purged. Reading the numbers waits for the device.
    """

    def __init__(self, folder: str | Path, *, updates: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            told = "TensorBoardLogger needs tensorboard. Install it with: pip install 'anybatch[tensorboard]'"
            raise ModuleNotFoundError(told, name=error.name) from None
        self.updates = updates
        self._writer = SummaryWriter(str(folder), purge_step=updates + 1 if updates else None)

    def __call__(self, result: UpdateResult) -> None:
        """Write the numbers of one update."""
        self.updates += 1
        for name, value in result.scalars().items():
            self._writer.add_scalar(f"update/{name}", value, self.updates)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()
