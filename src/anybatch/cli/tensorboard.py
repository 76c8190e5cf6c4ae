"""The records of a run as TensorBoard event files."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from anybatch.records import EpochDone, Metric, UpdateDone


class TensorBoard:
    """Writes into `tensorboard/` of the run folder; after a resume, what was undone is purged."""

    def __init__(self, folder: Path, update: int) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1 if update else None)

    def show(self, metric: Metric) -> None:
        """One record; the step is the number of the update."""
        if isinstance(metric, UpdateDone):
            for name in ("loss", "grad_norm", "lr"):
                self._writer.add_scalar(f"update/{name}", getattr(metric, name), metric.update)
        elif isinstance(metric, EpochDone):
            self._writer.add_scalars(
                "epoch/loss", {"train": metric.train_loss, "valid": metric.valid_loss}, metric.update
            )
            for name, value in metric.metrics.items():
                self._writer.add_scalar(f"epoch/{name}", value, metric.update)

    def close(self) -> None:
        """Write out what is left."""
        self._writer.close()
