"""What we rely on that torch promises nowhere: each alias of core/torch_private.py still does what anybatch uses it for."""

import gc
import io
import pickle
import sys
import tomllib
import warnings
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from anybatch.core import torch_private as releases


@pytest.fixture(scope="module")
def inside() -> ModuleType:
    return import_module("anybatch.core.torch_private")


# --- autograd


def test_run_engine_adds_the_gradient_as_backward_does(inside: ModuleType):
    rows, weight, other = torch.randn(5, 3), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    share = torch.tensor(0.25)
    for leaf in (weight, other):
        leaf.grad = torch.ones(3)
    torch.autograd.backward((rows @ other).square().mean(), share)
    with torch.no_grad():
        weight.copy_(other)
    loss = (rows @ weight).square().mean()
    inside.engine_run_backward((loss,), (share,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert torch.equal(weight.grad, other.grad)


def _saved(inside: ModuleType, node: Any, name: str) -> Any:
    return getattr(node, inside.SAVED + name, None)


def test_a_node_of_the_graph_tells_what_it_saved_and_the_shape_that_it_computed(inside: ModuleType):
    scores, target = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 2, -100, 1])
    node = nn.functional.cross_entropy(scores, target).grad_fn
    assert torch.equal(_saved(inside, node, "target"), target)
    assert (_saved(inside, node, "ignore_index"), _saved(inside, node, "reduction")) == (2**64 - 100, 1)
    assert float(_saved(inside, node, "total_weight")) == 3.0
    assert _saved(inside, node, "no_such_name") is None
    assert [tuple(output.shape) for output in inside.outputs_of(node)] == [()]
    assert [tuple(output.shape) for output in inside.outputs_of(node.next_functions[0][0])] == [(4, 3)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_graph_keeps_what_criteria_and_reductions_took_together(inside: ModuleType, reduction: str):
    scores = torch.randn(4, 3, requires_grad=True)
    node = nn.functional.mse_loss(scores, torch.zeros(4, 3), reduction=reduction).grad_fn
    assert _saved(inside, node, "reduction") == {"mean": 1, "sum": 2}[reduction]
    assert tuple(_saved(inside, node, "self").shape) == (4, 3)
    assert tuple(_saved(inside, getattr(scores, reduction)().grad_fn, "self_sym_sizes")) == (4, 3)
    assert torch.equal(_saved(inside, (scores * torch.ones(4, 3)).grad_fn, "other"), torch.ones(4, 3))


# --- modules


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)])
def test_batch_norm_layer_is_what_all_of_them_are(inside: ModuleType, layer: nn.Module):
    assert isinstance(layer, inside.BatchNormLayer)
    assert not isinstance(nn.InstanceNorm1d(2), inside.BatchNormLayer)


def test_batch_norm_layer_computes_without_ranks(inside: ModuleType):
    rows = torch.randn(5, 3)
    wanted = nn.BatchNorm1d(3)(rows)
    assert torch.equal(inside.BatchNormLayer.forward(nn.SyncBatchNorm(3), rows), wanted)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(2, track_running_stats=True), nn.InstanceNorm1d(2, track_running_stats=True)]
)
def test_norm_layer_keeps_running_statistics(inside: ModuleType, layer: nn.Module):
    assert isinstance(layer, inside.NormLayer)
    assert layer.track_running_stats
    assert isinstance(layer.running_mean, Tensor)


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.3), nn.Dropout1d(0.3), nn.Dropout2d(0.3), nn.Dropout3d(0.3), nn.AlphaDropout(0.3)]
)
def test_dropout_layer_is_what_all_of_them_are(inside: ModuleType, layer: nn.Module):
    assert isinstance(layer, inside.DropoutLayer)
    assert (layer.p, layer.inplace) == (0.3, False)


def test_children_of_is_the_table_that_forward_looks_into(inside: ModuleType):
    model = nn.Sequential(nn.Linear(2, 2))
    inside.children_of(model)["0"] = nn.Identity()
    rows = torch.randn(3, 2)
    assert torch.equal(model(rows), rows)


def test_buffers_of_is_the_table_that_holds_the_very_tensors(inside: ModuleType):
    layer = nn.BatchNorm1d(2)
    before = layer.running_mean
    layer.running_mean = torch.ones(2)
    inside.buffers_of(layer)["running_mean"] = before
    assert layer.running_mean is before
    assert dict(layer.named_buffers())["running_mean"] is before


def test_inside_compiled_is_the_module_that_was_wrapped(inside: ModuleType):
    model = nn.Linear(2, 2)
    assert inside.inside_compiled(model) is None
    assert inside.inside_compiled(torch.compile(model, backend="eager")) is model
    assert inside.is_dynamo_loaded()


def test_is_dynamo_loaded_names_a_module_of_torch(inside: ModuleType, monkeypatch: pytest.MonkeyPatch):
    assert find_spec("torch._dynamo") is not None
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert not inside.is_dynamo_loaded()


def test_is_compiled_in_place_after_compile(inside: ModuleType):
    model = nn.Linear(2, 2)
    assert not inside.is_compiled_in_place(model)
    model.compile(backend="eager")
    assert inside.is_compiled_in_place(model)


# --- tensors


def test_num_writes_counts_writes_in_place_also_through_views(inside: ModuleType):
    tensor = torch.zeros(3)
    before = inside.version_of(tensor)
    _ = tensor + 1
    assert inside.version_of(tensor) == before
    tensor.add_(1)
    tensor[:1].zero_()
    assert inside.version_of(tensor) == before + 2


def test_storage_key_is_one_for_all_views_of_a_storage(inside: ModuleType):
    tensor, other = torch.zeros(3), torch.zeros(3)
    assert inside.storage_cdata(tensor.untyped_storage()) == inside.storage_cdata(tensor[1:].untyped_storage())
    assert inside.storage_cdata(tensor.untyped_storage()) != inside.storage_cdata(other.untyped_storage())


def test_storage_behind_a_weak_reference_is_gone_with_the_last_tensor(inside: ModuleType):
    tensor = torch.arange(3)
    reference = inside.StorageWeakRef(tensor.untyped_storage())
    found = inside.storage_behind(reference)
    assert found.data_ptr() == tensor.data_ptr()
    assert not reference.expired()
    del tensor, found
    gc.collect()
    assert inside.storage_behind(reference) is None
    assert reference.expired()


def test_fake_tensors_have_shapes_and_no_memory(inside: ModuleType):
    with inside.FakeTensorMode() as mode:
        fake = torch.empty(2**40, 2)
        assert (fake @ torch.empty(2, 3)).shape == (2**40, 3)
    assert isinstance(fake, inside.FakeTensor)
    assert mode is not None


def test_read_layout_is_what_a_pickled_layout_is_read_with(inside: ModuleType):
    asked: list[tuple[str, str]] = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.append((module, name))
            return inside.get_layout

    assert Unpickler(io.BytesIO(pickle.dumps(torch.strided))).load() is torch.strided
    assert asked == [(inside.get_layout.__module__, inside.get_layout.__name__)]


def test_lists_of_tensors_are_changed_in_place(inside: ModuleType):
    values = [torch.tensor([3.0, -4.0]), torch.tensor([2.0])]
    assert [float(norm) for norm in inside.foreach_norm(values)] == [5.0, 2.0]
    inside.foreach_mul_(values, 2.0)
    inside.foreach_mul_(values, torch.tensor(0.5))
    assert [value.tolist() for value in values] == [[3.0, -4.0], [2.0]]
    inside.foreach_clamp_min_(values, -1.0)
    inside.foreach_clamp_max_(values, 2.5)
    assert [value.tolist() for value in values] == [[2.5, -1.0], [2.0]]


# --- modes


def _ops(inside: ModuleType, action: Any) -> list[Any]:
    """The ops that a dispatch mode sees while `action` runs."""
    seen: list[Any] = []

    class Watching(inside.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        action()
    return seen


def test_copy_elsewhere_is_the_op_behind_to(inside: ModuleType):
    tensor = torch.zeros(2)
    assert inside.TO_COPY in _ops(inside, lambda: tensor.to("meta"))


def test_op_name_has_no_overload(inside: ModuleType):
    assert [inside.op_name(op) for op in _ops(inside, lambda: torch.zeros(2).bernoulli_(0.5))][-1] == "aten::bernoulli_"


def test_the_draws_that_verify_replays_are_ops_of_torch():
    missing = [
        name for name in import_module("anybatch.verification.draws")._PURE if not hasattr(torch.ops.aten, name[6:])
    ]
    assert missing == []


def test_without_modes_no_mode_sees(inside: ModuleType):
    def action() -> None:
        with inside.disable_current_modes():
            torch.zeros(2).add_(1)

    assert _ops(inside, action) == []


def test_modes_are_listed_from_the_outermost(inside: ModuleType):
    class Function(torch.overrides.TorchFunctionMode):
        pass

    class Dispatch(inside.TorchDispatchMode):
        pass

    functions, dispatches = [Function(), Function()], [Dispatch(), Dispatch()]
    with functions[0], functions[1], dispatches[0], dispatches[1]:
        now = inside.function_mode_stack(), inside.dispatch_mode_stack()
    assert [list(modes) for modes in now] == [functions, dispatches]
    assert not inside.function_mode_stack()
    assert not inside.dispatch_mode_stack()


def test_without_dynamo_a_function_is_not_compiled(inside: ModuleType):
    seen = []

    @inside.disable_dynamo
    def look(rows: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return rows

    torch.compile(lambda rows: look(rows + 1), backend="eager")(torch.zeros(2))
    assert seen == [False]


def test_is_profiled_inside_a_profile_only(inside: ModuleType):
    assert not inside.profiler_enabled()
    with profile(activities=[ProfilerActivity.CPU]):
        assert inside.profiler_enabled()
    assert not inside.profiler_enabled()


def test_profiler_events_hold_every_allocation(inside: ModuleType):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        kept = torch.empty(1000)
    events = [event for event in inside.profiler_events(profiler) if event.name() == "[memory]"]
    assert [event.nbytes() for event in events] == [kept.nbytes]
    assert all(event.start_ns() > 0 and event.device_type().name == "CPU" for event in events)


def test_without_op_names_a_profile_has_allocations_alone(inside: ModuleType):
    names = []
    for around in (nullcontext, inside.without_op_names):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, around():
            kept = torch.ones(1000).requires_grad_()
            (kept * 2).sum().backward()
        names.append({event.name() for event in inside.profiler_events(profiler)})
    assert names[0] > names[1] == {"[memory]"}


def test_what_fake_tensors_remember_is_forgotten(inside: ModuleType):
    with inside.FakeTensorMode() as mode:
        torch.empty(3, 4) + torch.empty(3, 4)
    assert mode.cache_info().size > 0
    inside.clear_fake_cache()
    assert mode.cache_info().size == 0


def test_is_in_backward_where_a_block_is_computed_again(inside: ModuleType):
    seen = []

    def block(rows: Tensor) -> Tensor:
        seen.append(inside.is_in_backward())
        return rows.sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]


# --- the scaler


def test_overflows_are_seen_and_written_and_forgotten(inside: ModuleType):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert [float(found) for found in inside.overflows(scaler, optimizer)] == [0.0]
    inside.forget_unscaling(scaler, optimizer)
    scaler.unscale_(optimizer)  # raises where it is remembered
    for found in inside.overflows(scaler, optimizer):
        found.fill_(1.0)
    scaler.step(optimizer)
    assert parameter.tolist() == [1.0, 1.0]


# --- what steps beside the optimizer


def test_instance_norm_layer_is_what_all_of_them_are(inside: ModuleType):
    assert all(isinstance(kind(2), inside.InstanceNormLayer) for kind in (nn.InstanceNorm1d, nn.InstanceNorm3d))
    assert not isinstance(nn.BatchNorm1d(2), inside.InstanceNormLayer)


def test_spectral_norm_weight_steps_two_vectors_in_every_forward(inside: ModuleType):
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 40), n_power_iterations=1)
    weight = layer.parametrizations.weight[0]
    assert isinstance(weight, inside.SpectralNormWeight)
    with torch.no_grad():
        layer.parametrizations.weight.original.normal_()  # else the first iterations may have settled
    before = [inside.buffers_of(weight)[name].clone() for name in ("_u", "_v")]
    layer(torch.randn(2, 3))
    assert not any(map(torch.equal, before, [inside.buffers_of(weight)[name] for name in ("_u", "_v")]))


def test_pre_hooks_of_holds_the_old_form_of_spectral_norm(inside: ModuleType):
    layer = nn.utils.spectral_norm(nn.Linear(3, 4))
    (hook,) = inside.pre_hooks_of(layer).values()
    assert hook.name == "weight"
    assert {"weight_u", "weight_v"} <= inside.buffers_of(layer).keys()


def test_call_hooks_of_shows_what_is_called_around_a_forward(inside: ModuleType):
    layer = nn.Linear(2, 2)
    assert not any(inside.call_hooks_of(layer))
    handles = [layer.register_forward_hook(print), layer.register_forward_pre_hook(len)]
    assert [list(hooks.values()) for hooks in inside.call_hooks_of(layer)] == [[print], [len]]
    for handle in handles:
        handle.remove()


def test_gradient_hooks_of_shows_both_kinds_and_nothing_without_any(inside: ModuleType):
    weight = nn.Parameter(torch.zeros(2))
    assert not any(inside.gradient_hooks_of(weight))
    handles = [weight.register_hook(len), weight.register_post_accumulate_grad_hook(len)]
    assert [list(hooks.values()) for hooks in inside.gradient_hooks_of(weight)] == [[len], [len]]
    for handle in handles:
        handle.remove()
    assert not any(inside.gradient_hooks_of(weight))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_parameters_stepped_in_backward_carry_their_optimizers(inside: ModuleType):
    from torch.distributed.optim import _apply_optimizer_in_backward

    weight = nn.Parameter(torch.zeros(2))
    assert inside.STEPPED_IN_BACKWARD not in weight.__dict__
    _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})
    assert isinstance(weight.__dict__[inside.STEPPED_IN_BACKWARD][0], torch.optim.SGD)


# --- releases


def test_a_release_that_was_not_run_yet_is_told_and_those_that_were_are_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("2.13.0", "2.14.1+cu130", "2.15.0+cu132"):
            releases.warn_of_newer(version)
    for version in ("2.16.0", "2.100.1+cpu", "3.0.0a0+git1234567"):
        with pytest.warns(RuntimeWarning, match="is newer than 2.15, the newest that this anybatch was run with"):
            releases.warn_of_newer(version)


def test_pyproject_asks_for_the_releases_that_were_run():
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert wanted == [f"torch>=2.13,<{releases.NEWEST[0]}.{releases.NEWEST[1] + 1}"]
