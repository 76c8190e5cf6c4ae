"""A model that is wrapped for several ranks, on one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import Accumulator, supervised
from tests.reference import gradient, whole_batch_gradient


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_one_rank_under_ddp_is_exact():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batch = (torch.randn(22, 4), torch.randint(0, 3, (22,)))
    reference = whole_batch_gradient(model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1]), batch)
    wrapped = DistributedDataParallel(model)
    Accumulator(wrapped, supervised(nn.CrossEntropyLoss()), micro_batch=5).backward(batch)
    assert float((gradient(model.parameters()) - reference).norm() / reference.norm()) < 5e-7


@pytest.mark.usefixtures("one_rank")
def test_gradients_that_are_views_of_buckets_are_added_to_and_not_overwritten():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batch = (torch.randn(22, 4), torch.randint(0, 3, (22,)))
    reference = whole_batch_gradient(model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1]), batch)
    accumulator = Accumulator(
        DistributedDataParallel(model, gradient_as_bucket_view=True), supervised(nn.CrossEntropyLoss()), micro_batch=5
    )
    accumulator.backward(batch)
    accumulator.backward(batch)
    assert float((gradient(model.parameters()) - 2 * reference).norm() / reference.norm()) < 1e-6
