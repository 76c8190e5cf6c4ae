"""Accelerate: `prepared_update` and `global_loader`. Handwritten digits, on any number of processes.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_digits.py [epochs]
"""

import sys

import accelerate
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from anybatch import supervised
from anybatch.integrations.accelerate import global_loader, prepared_update


def main(epochs: int = 3) -> float:
    """Train; return the loss of the last batch of all processes."""
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    accelerator = accelerate.Accelerator(cpu=True)  # was: gradient_accumulation_steps=4
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * -(-len(rows) // 256))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    update = prepared_update(
        accelerator, model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=64, scheduler=schedule
    )
    loader = global_loader(accelerator, rows, batch_size=256)
    for _ in range(epochs):
        for batch in loader:
            result = update(batch)
    accelerator.print(f"loss of the last batch: {result.loss.item():.3f}")
    return result.loss.item()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
