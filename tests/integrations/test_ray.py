"""The example of Ray Train goes on after a worker was killed."""

import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from anybatch import GlobalBatches, Update, supervised


def whole_run(epochs):
    """The same training in this process: the loss of its last batch."""
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=256)
    loader = GlobalBatches(rows, 256).loader()
    return [update(batch).loss.item() for _ in range(epochs) for batch in loader][-1]


def test_ray_goes_on_after_a_killed_worker_as_if_nothing_had_been():
    import ray  # takes as long to load as all of torch

    from examples.ray_digits import main

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            killed = main(epochs=2, dies_at=1)
        finally:
            ray.shutdown()
    assert killed["first"] == 1, "the second epoch was begun again"
    assert killed["loss"] == pytest.approx(whole_run(2), rel=1e-5)
