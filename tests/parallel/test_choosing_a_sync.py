"""Which synchronisation a batch gets, and that each leaves the same gradient; in a group of one rank, where none sends much."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from anybatch.core import ALONE, Needs
from anybatch.errors import ParallelError
from anybatch.parallel import parallelism_for, peeled, unreplicated, unwrapped
from anybatch.parallel.ddp import Bucketed, Reduced
from anybatch.parallel.fsdp import Gathered, Scattered

WHY = Needs(own_reduction="the gradient of a coupled loss")
AT_ONCE = Needs(own_reduction="the gradient of batch_norm='exact'", one_collective=True)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def hooked() -> DistributedDataParallel:
    def first_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        raise AssertionError

    model = DistributedDataParallel(network())
    model.register_comm_hook(None, first_hook)
    return model


def test_a_model_that_is_not_wrapped_is_alone():
    assert parallelism_for(network(), reshard=True) is ALONE
    assert ALONE.sync(AT_ONCE, last_pass_fits=False) is ALONE


@pytest.mark.parametrize(
    ("needs", "last_pass_fits", "dtype", "kind"),
    [
        (Needs(), True, torch.float32, Reduced),
        (Needs(), False, torch.float32, Bucketed),
        (Needs(), True, torch.bfloat16, Bucketed),
        (WHY, True, torch.float32, Bucketed),
        (AT_ONCE, True, torch.float32, Bucketed),
    ],
)
def test_ddp_reduces_itself_unless_something_stands_against_it(
    needs: Needs, last_pass_fits: bool, dtype: torch.dtype, kind: type
):
    model = DistributedDataParallel(network().to(dtype))
    sync = parallelism_for(model, reshard=True).sync(needs, last_pass_fits=last_pass_fits)
    assert type(sync) is kind
    assert sync.reduces_in_last_backward == (kind is Reduced)


def test_a_comm_hook_is_called_even_where_the_last_pass_is_not_proven():
    assert type(parallelism_for(hooked(), reshard=True).sync(Needs(), last_pass_fits=False)) is Reduced


def test_a_comm_hook_that_would_not_be_called_is_refused():
    with pytest.raises(ParallelError, match="comm hook first_hook, but the gradient of a coupled loss cannot"):
        parallelism_for(hooked(), reshard=True).sync(WHY)


def test_fully_shard_gathers_for_one_pass_or_for_one_batch():
    engine = parallelism_for(fully_shard(network()), reshard=True)
    assert type(engine.sync(WHY)) is Scattered
    assert type(engine.sync(AT_ONCE)) is Gathered
    assert engine.needs_equal_passes


@pytest.mark.parametrize(
    "wrap", [lambda model: model, DistributedDataParallel, fully_shard], ids=["alone", "ddp", "fsdp"]
)
@pytest.mark.parametrize("needs", [Needs(), WHY, AT_ONCE], ids=["none", "own_reduction", "one_collective"])
def test_every_sync_leaves_the_gradient_of_all_passes(wrap: Any, needs: Needs):
    rows = torch.linspace(-1, 1, 36).reshape(12, 3)
    plain = network().eval()
    plain(rows).square().sum().backward()
    model = wrap(network().eval())
    sync = parallelism_for(model, reshard=False).sync(needs)
    if needs.one_collective:
        with sync.around_pass(is_last=True):
            outputs = [model(part) for part in rows.split(5)]
            for output in outputs:
                output.square().sum().backward()
    else:
        for number, part in enumerate(rows.split(5), start=1):
            with sync.around_pass(is_last=number == 3):
                model(part).square().sum().backward()
    sync.close(list(model.parameters()))
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        grad = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        assert torch.allclose(grad, wanted.grad, rtol=1e-5)


@pytest.mark.parametrize("needs", [Needs(), WHY], ids=["reduced", "bucketed"])
def test_ddp_sends_its_buffers_again_after_an_error(needs: Needs):
    """On every rank: one that failed in its first forward would else be alone to send them when the batch starts again."""
    model = DistributedDataParallel(network())
    sync = parallelism_for(model, reshard=True).sync(needs)
    with sync.around_pass(is_last=False):
        model(torch.randn(4, 3))
    assert not model.will_sync_module_buffers()
    sync.reset()
    assert model.will_sync_module_buffers()


def test_ddp_holds_no_model_after_forwards_that_left_out_of_order():
    model = DistributedDataParallel(network())
    with pytest.raises(KeyError), parallelism_for(model, reshard=True).sync(AT_ONCE).around_pass(is_last=True):
        DistributedDataParallel._active_ddp_module = model
        raise KeyError
    assert DistributedDataParallel._active_ddp_module is None


def test_unwrapped_is_inside_ddp_and_compile_in_any_order():
    model = network()
    outside = DistributedDataParallel(torch.compile(model, backend="eager"))
    inside = torch.compile(DistributedDataParallel(model), backend="eager")
    assert unwrapped(model) is unwrapped(outside) is unwrapped(inside) is model
    assert [type(module).__name__ for module in peeled(outside)][::2] == ["DistributedDataParallel", "Sequential"]


def test_unreplicated_stays_compiled():
    compiled = torch.compile(network(), backend="eager")
    assert unreplicated(DistributedDataParallel(compiled)) is compiled
    assert unreplicated(compiled) is compiled
