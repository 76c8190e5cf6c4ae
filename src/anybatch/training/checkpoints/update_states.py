"""The state of an update as named tensors, which many ranks may share, and plain values; and putting it back.

Names are those of the unwrapped model: the same under DDP, under FSDP2, compiled, and in one process.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.errors import CheckpointError, first_line
from anybatch.parallel import is_sharded, unwrapped
from anybatch.training.checkpoints.checkpoint_files import TensorShape, read_tensors
from anybatch.update import Update


class OtherUpdateError(CheckpointError):
    """A checkpoint of another model, optimizer or run: no older one of its folder would fit either."""


def states_of(update: Update) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of an update, which many ranks may share, by name; and all its other states as plain values."""
    model, optimizer = unwrapped(update.model).state_dict(), update.optimizer.state_dict()
    tensors = {f"model.{name}": value for name, value in model.items() if isinstance(value, Tensor)} | _beside(update)
    moments: dict[str, tuple[Any, str]] = {}
    rest: dict[Any, dict[str, Any]] = {}
    for key, state in optimizer["state"].items():
        rest[key] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                moments[f"optimizer.{key}.{name}"] = (key, name)
                tensors[f"optimizer.{key}.{name}"] = value
            else:
                rest[key][name] = value
    return tensors, {
        "noise": update.noise.state_dict(),
        "model": {name: value for name, value in model.items() if not isinstance(value, Tensor)},
        "optimizer": optimizer | {"state": rest},
        "moments": moments,
        "optimizer_type": type(update.optimizer).__name__,
        "scheduler": None if update.scheduler is None else update.scheduler.state_dict(),
        "scaler": None if update.scaler is None else update.scaler.state_dict(),
        "split": split.state_dict() if hasattr(split := update.accumulator.split, "state_dict") else None,
    }


def _beside(update: Update) -> dict[str, Tensor]:
    """Parameters that the optimizer steps and the model does not have, by their place in it; and a coupled loss's buffers."""
    own = set(unwrapped(update.model).parameters())
    stepped = [parameter for group in update.optimizer.param_groups for parameter in group["params"]]
    found = {f"beside.{place}": held.detach() for place, held in enumerate(stepped) if held not in own}
    loss = update.accumulator.objective.loss
    buffers = loss.named_buffers() if isinstance(loss, nn.Module) else ()
    return found | {f"beside.loss.{name}": held for name, held in buffers}


def optimizer_state(states: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The optimizer's state as its `state_dict` was."""
    state: dict[Any, dict[str, Any]] = {key: dict(values) for key, values in states["optimizer"]["state"].items()}
    for full, (key, name) in states["moments"].items():
        state[key][name] = tensors[full]
    joined_ranks: dict[str, Any] = states["optimizer"] | {"state": state}
    return joined_ranks


def check_fits(path: Path, states: Mapping[str, Any], shapes: Mapping[str, TensorShape], update: Update) -> None:
    """Raise before anything is changed."""
    saved: dict[str, str] = {
        name.removeprefix("model."): str(shape) for name, shape in shapes.items() if name.startswith("model.")
    }
    saved |= {name: type(value).__name__ for name, value in states["model"].items()}
    there = {name: _described(value) for name, value in unwrapped(update.model).state_dict().items()}
    if saved != there:
        names = sorted(name for name in saved.keys() | there.keys() if saved.get(name) != there.get(name))
        name = names[0]
        raise OtherUpdateError(
            f"{path} is of another model: {name!r} is {saved.get(name, 'missing')} in the checkpoint and "
            f"{there.get(name, 'missing')} in the model ({len(names)} differ). Resume with the task that saved it."
        )
    saved = {name: str(shape) for name, shape in shapes.items() if name.startswith("beside.")}
    there = {name: _described(value) for name, value in _beside(update).items()}
    if saved != there:
        name = min(name for name in saved.keys() | there.keys() if saved.get(name) != there.get(name))
        place = name.removeprefix("beside.")
        raise OtherUpdateError(
            f"{path} has other parameters beside the model, such as a loss's: {place!r} of the optimizer or the loss is "
            f"{saved.get(name, 'missing')} in the checkpoint and {there.get(name, 'missing')} in this run. Give the optimizer "
            "the parameters that it had when it was saved."
        )
    kind = type(update.optimizer).__name__
    if states["optimizer_type"] != kind:
        raise OtherUpdateError(
            f"{path} was saved with {states['optimizer_type']}, this run has {kind}. Resume with the same optimizer."
        )
    for name, part in (("scheduler", update.scheduler), ("scaler", update.scaler)):
        if (states[name] is None) != (part is None):
            has, wants = ("no", "one") if states[name] is None else ("a", "none")
            raise OtherUpdateError(
                f"{path} has {has} {name}, this run has {wants}. Resume with the settings that it was saved with."
            )


def _described(value: object) -> str:
    return str(TensorShape(value.shape, value.dtype)) if isinstance(value, Tensor) else type(value).__name__


def load_states(path: Path, states: Mapping[str, Any], shapes: Mapping[str, TensorShape], update: Update) -> None:
    parameters = [parameter for group in update.optimizer.param_groups for parameter in group["params"]]
    moments = {
        name: _empty_for(shapes[name], parameters[key] if isinstance(key, int) and key < len(parameters) else None)
        for name, (key, _) in states["moments"].items()
    }
    read_tensors(path, moments)
    try:
        update.optimizer.load_state_dict(optimizer_state(states, moments))
    except ValueError as error:
        raise OtherUpdateError(
            f"{path} does not fit this optimizer: {first_line(error)}. Resume with the optimizer that it was saved with."
        ) from error
    model = unwrapped(update.model)
    weights = model.state_dict()
    read_tensors(path, {f"model.{name}": value for name, value in weights.items() if isinstance(value, Tensor)})
    model.load_state_dict(weights | states["model"])
    read_tensors(path, _beside(update))
    if update.scheduler is not None:
        update.scheduler.load_state_dict(states["scheduler"])
    if update.scaler is not None:
        update.scaler.load_state_dict(states["scaler"])
    update.noise.load_state_dict(states.get("noise"))
    if states.get("split") is not None and hasattr(split := update.accumulator.split, "load_state_dict"):
        split.load_state_dict(states["split"])  # what was learnt of costs: the cut goes on as it was


@contextmanager
def put_back_after_errors(update: Update) -> Iterator[None]:
    """The block for `load_states`: where anything raises in it, the update is as it was before."""
    optimizer, model = update.optimizer, unwrapped(update.model)
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)} | _beside(update)
    tensors = [(value, value.detach().clone()) for value in held.values()]
    steps, groups = optimizer.state, optimizer.param_groups  # loading makes new ones
    stateful: list[Any] = [update.scheduler, update.scaler, update.accumulator.split]
    parts = [part for part in stateful if hasattr(part, "load_state_dict")]
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for value, before in tensors:
                value.copy_(before)
        optimizer.state, optimizer.param_groups = steps, groups
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        raise


def _empty_for(shape: TensorShape, parameter: Tensor | None) -> Tensor:
    """A tensor to read into: sharded as its parameter is, if it is of the parameter's size."""
    if parameter is not None and is_sharded(parameter) and parameter.shape == shape.size:
        return torch.empty_like(parameter, dtype=shape.dtype, requires_grad=False)
    return torch.empty(shape.size, dtype=shape.dtype)
