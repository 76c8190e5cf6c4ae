"""Lightning: `Trainer(strategy=ExactStrategy(...))`. Handwritten digits, with one class that weighs 20 times as much.

python examples/lightning_digits.py [epochs]
"""

import sys

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from anybatch.integrations.lightning import ExactStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.weight = torch.tensor([20.0] + [1.0] * 9)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1], self.weight)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(epochs: int = 3) -> float:
    """Train; return the last logged loss, that of a whole batch."""
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    trainer = lightning.Trainer(
        strategy=ExactStrategy(micro_batch=16),  # was: accumulate_grad_batches=16, and batches of 16
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(rows, batch_size=256, shuffle=True))
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    print(f"loss of the last batch: {main(*map(int, sys.argv[1:])):.3f}")
