"""What anybatch uses of DDP and FSDP2 under private names, in a group of one rank."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core import torch_private as releases
from anybatch.core.torch_private import leaves_of
from anybatch.errors import ParallelError
from anybatch.parallel import torch_private_ddp, torch_private_fsdp, wrapping_of

inside = SimpleNamespace(**{**vars(releases), **vars(torch_private_ddp), **vars(torch_private_fsdp)})


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def replicated(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), **options)


def sharded(**options: Any) -> Any:
    """Two units: a layer, and the rest."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def rows() -> Tensor:
    return torch.linspace(-1, 1, 15).reshape(5, 3)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


# --- DDP


def test_comm_hooks_are_those_that_were_registered():
    model = replicated()
    assert inside.comm_hooks(model) == []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return torch.futures.Future()

    model.register_comm_hook(None, hook)
    assert inside.comm_hooks(model) == [hook]


def test_buffers_are_sent_once_and_again_only_when_told(monkeypatch: pytest.MonkeyPatch):
    model = replicated()
    sent = []
    original = model._sync_buffers
    monkeypatch.setattr(model, "_sync_buffers", lambda: (sent.append(1), original()))
    inside.sync_buffers_once(model)
    inside.sync_buffers_once(model)
    with model.no_sync():
        model(rows())
    assert len(sent) == 1
    inside.sync_buffers_again(model)
    model(rows())
    assert len(sent) == 2


def test_a_reduction_that_never_ended_raises():
    model = DistributedDataParallel(nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}))
    model.module.forward = lambda x: model.module["used"](x)
    model(rows()).sum().backward()
    with pytest.raises(RuntimeError, match="finished reduction"):
        inside.end_reduction(model)


def test_a_reduction_that_ended_does_not():
    model = replicated()
    model(rows()).sum().backward()
    inside.end_reduction(model)


def test_used_parameters_are_found_anew_when_ddp_was_told_to_forget():
    model = DistributedDataParallel(
        nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}), find_unused_parameters=True
    )
    model.module.forward = lambda x, name: model.module[name](x)
    with model.no_sync():
        model(rows(), "a").sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    inside.forget_used_parameters(model)
    model(rows(), "b").sum().backward()
    assert [parameter.grad is None for parameter in model.parameters()] == [True, True, False, False]


def test_the_active_module_is_put_back():
    model = replicated()
    with inside.restoring_active_ddp():
        DistributedDataParallel._active_ddp_module = model
    assert DistributedDataParallel._active_ddp_module is None


# --- FSDP2


def test_sharded_kind_is_the_mark_of_fully_shard(monkeypatch: pytest.MonkeyPatch):
    model = sharded()
    assert isinstance(model, inside.sharded_kind())
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    assert inside.sharded_kind() is None


def test_states_begin_with_the_root_and_groups_hold_all_parameters():
    model = sharded()
    states = inside.fsdp_states(model)
    assert states == [inside.fsdp_state(model), inside.fsdp_state(model[0])]
    held = [taken.sharded_param for group in inside.fsdp_groups([model]) for taken in group.fsdp_params]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in model.parameters()}


def test_what_fully_shard_was_given_is_found_with_each_parameter():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    found = list(inside.sharded_parameters(model))
    assert [shape for shape, _, _, _ in found] == [(2, 4), (2,), (4, 3), (4,)]
    policies = {(policy.param_dtype, policy.reduce_dtype) for _, _, _, policy in found}
    assert policies == {(torch.bfloat16, torch.float32)}
    assert all(mesh.ndim == 1 and whole.device_mesh is not None for _, whole, mesh, _ in found)


def test_flat_group_holds_all_ranks_of_a_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    assert dist.get_process_group_ranks(inside.flat_group(mesh)) == [0]


def test_resharding_is_put_back_group_by_group():
    model = sharded()
    model[0].set_reshard_after_backward(False)
    before = [group.reshard_after_backward for group in inside.fsdp_groups([model])]
    with inside.restoring_reshard([model]):
        model.set_reshard_after_backward(False)
        assert not any(group.reshard_after_backward for group in inside.fsdp_groups([model]))
    assert [group.reshard_after_backward for group in inside.fsdp_groups([model])] == before == [True, False]


def test_forwards_under_way_at_once_give_the_gradient_of_one():
    model, twin = sharded(), sharded()
    twin(rows()).square().sum().backward()
    inside.gather_for_batch(model)
    whole = inside.gathered_parameters([model])
    assert sorted(tuple(parameter.shape) for parameter, _ in whole) == [(2,), (2, 4), (4,), (4, 3)]
    with inside.forwards_as_repeats([model]):
        outputs = [model(part) for part in rows().split(2)]
        assert all(parameter.untyped_storage().nbytes() for parameter, _ in whole)
        for output in outputs:
            output.square().sum().backward()
    inside.reduce_gathered(model)
    for got, wanted in zip(gradients(model), gradients(twin), strict=True):
        assert torch.allclose(got, wanted, rtol=1e-6)
    assert all(state._training_state.name == "IDLE" for state in inside.fsdp_states(model))
    model(rows()).square().sum().backward()  # as ever after
    for got, wanted in zip(gradients(model), gradients(twin), strict=True):
        assert torch.allclose(got, 2 * wanted, rtol=1e-6)


def test_the_leaves_of_a_forward_are_the_whole_parameters():
    model = sharded()
    parts = {id(part) for part in model.parameters()}
    assert inside.whole_parameters(model) == []
    leaves = {id(leaf) for leaf in leaves_of([model(rows()).sum()])}
    assert {id(whole) for _, whole in inside.whole_parameters(model)} == leaves
    assert {id(part) for part, _ in inside.whole_parameters(model)} == parts


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_gradients_that_were_not_reduced_are_forgotten(reduce_dtype: torch.dtype | None):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=None if reduce_dtype is None else torch.bfloat16, reduce_dtype=reduce_dtype
    )
    model, twin = sharded(mp_policy=policy), sharded(mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(rows()).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    inside.forget_gathered_gradients([model])
    for each in (model, twin):
        each(rows()).square().sum().backward()
    for got, wanted in zip(gradients(model), gradients(twin), strict=True):
        assert torch.equal(got, wanted)


# --- a release that lacks a name

DDP_NAMES = ("_comm_hooks", "_sync_buffers", "_active_ddp_module", "reducer", "will_sync_module_buffers")
DDP_NAMES += ("require_forward_param_sync", "_rebuild_buckets", "_reset_state")
FSDP_NAMES = (
    "_get_fsdp_state",
    "_fsdp_param_groups",
    "_modules",
    "_training_state",
    "_lazy_init",
    "PRE_BACKWARD",
    "IDLE",
)
FSDP_NAMES += (
    "_root_post_backward_final_callback",
    "fsdp_params",
    "mesh_info",
    "reshard_after_backward",
    "sharded_param",
)
FSDP_NAMES += (
    "unsharded_param",
    "_unsharded_param",
    "unsharded_accumulated_grad",
    "reduce_dtype",
    "_orig_size",
    "mp_policy",
    "_state_ctx",
)


def _lacks(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    has = releases._has
    monkeypatch.setattr(releases, "_has", lambda thing, name: name != lacking and has(thing, name))


@pytest.mark.parametrize("name", DDP_NAMES)
def test_ddp_without_a_name_is_refused_by_version_and_name(monkeypatch: pytest.MonkeyPatch, name: str):
    model = replicated()
    inside.check_ddp(model)
    _lacks(monkeypatch, name)
    with pytest.raises(
        ParallelError, match=rf"torch {torch.__version__.replace('+', '.')} has no \w+\.{name}, .* Install"
    ):
        wrapping_of(model)


@pytest.mark.parametrize("name", FSDP_NAMES)
def test_fully_shard_without_a_name_is_refused_by_version_and_name(monkeypatch: pytest.MonkeyPatch, name: str):
    model = sharded()
    inside.check_fsdp(model)
    _lacks(monkeypatch, name)
    with pytest.raises(
        ParallelError, match=rf"torch {torch.__version__.replace('+', '.')} has no \w+\.{name}, .* Install"
    ):
        wrapping_of(model)
