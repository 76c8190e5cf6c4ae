"""Ray Train: an `Update` in each worker, rows dealt by `GlobalBatches`, a checkpoint after every epoch.

    python examples/ray_digits.py [epochs]

If a worker dies, Ray restarts all of them, and training resumes from the last checkpoint.
"""

import os
import sys
import tempfile
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from anybatch import GlobalBatches, Update, resume, save, supervised


def train(config: dict[str, Any]) -> None:
    """Train in one worker."""
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=64)
    batches = GlobalBatches(rows, 256)  # deals every row to one worker in every epoch
    resumed = resume(config["folder"], update)  # a folder that all workers see: each reads and writes its part
    first = 0 if resumed is None else resumed.number // len(batches)
    for epoch in range(first, config["epochs"]):
        batches.set_epoch(epoch)
        for batch in batches.loader():
            result = update(batch)
        if epoch == config.get("dies_at") and first == 0 and ray.train.get_context().get_world_rank() == 1:
            os._exit(1)  # like a machine that is switched off
        path = save(config["folder"], update, number=(epoch + 1) * len(batches))
        metrics = {"loss": result.loss.item(), "first": first}
        is_first = ray.train.get_context().get_world_rank() == 0
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(path) if is_first else None)


def main(epochs: int = 3, **config: Any) -> dict[str, Any]:
    """Train on two workers; return the metrics reported last."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": epochs, "folder": folder, **config},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            torch_config=TorchConfig(backend="gloo"),
            run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=1)),
        )
        return dict(trainer.fit().metrics or {})


if __name__ == "__main__":
    print(f"loss of the last batch: {main(*map(int, sys.argv[1:]))['loss']:.3f}")
