"""Copies to try things on: of fake tensors, which hold no numbers and take no memory, or of real ones."""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from anybatch.core import (
    Batch,
    FakeTensor,
    FakeTensorMode,
    Snapshot,
    TensorFile,
    buffers_of,
    gradient_hooks_of,
    kept_aside,
    map_tensors,
    outer_random,
    tables_of,
    tensors,
)
from anybatch.errors import PlanError
from anybatch.memory.meter import optimizer_tensors
from anybatch.memory.recorder import ELSEWHERE
from anybatch.verification import PythonState, functions_of

Parts = tuple[nn.Module, Optimizer | None, Any]
"""Model, optimizer and objective: copied together, so that what they share stays shared."""
_MASKING, _FIND_PACKED = "transformers.masking_utils", "find_packed_sequence_indices"
UNCOPYABLE = (TypeError, RuntimeError, AttributeError, NotImplementedError)
"""What deepcopy raises of what it cannot copy."""


class _Fakes(TorchFunctionMode):
    """Inside this block copying a tensor makes a fake one, on the CPU, wherever the tensor lies."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = fake = fake_like(tensor, self._mode)
            return fake
        return func(*args, **(kwargs or {}))


def fake_copies(parts: Parts, mode: FakeTensorMode) -> Parts:
    """The same parts of fake tensors; nothing is allocated, whatever the size."""
    memo = {id(tensor): fake_like(tensor, mode) for tensor in _large_tensors(parts)}
    with _Fakes(mode):
        return _copied(parts, memo)


def real_copies(parts: Parts, device: torch.device) -> Parts:
    """The same parts, on `device`; gradients are not copied."""
    model, optimizer, objective = _copied(parts, {})
    model.to(device)
    return model, optimizer, objective


@contextmanager
def undone(parts: Parts) -> Iterator[None]:
    """The block after which parameters, buffers, gradients, the optimizer and what Python code can reach are as they were.

    Copies lie aside: on disk, or from an accelerator on the host. Gradients are None inside.
    """
    model, optimizer, objective = parts
    tensors = list(dict.fromkeys(_large_tensors(parts)))
    state = [] if optimizer is None else list(optimizer_tensors(optimizer))
    file = TensorFile()
    before = Snapshot(
        # .data: what is put back does not count as a write, which would be told as one of the model's forward
        tensors=[(one.data, kept_aside(one.detach(), file)) for one in (*tensors, *state)],
        optimizer=None if optimizer is None else tables_of(optimizer),
    )
    gradients = [(one, one.grad) for one in tensors]
    python = PythonState(model, *functions_of(objective), owned=[*model.modules()])
    slots = [(module, dict(buffers_of(module))) for module in model.modules()]
    for one in tensors:
        one.grad = None
    try:
        yield
    finally:
        for module, buffers in slots:
            buffers_of(module).update(buffers)
        for one in tensors:
            one.grad = None  # makes room for what is read back
        before.put_back()
        for one, gradient in gradients:
            one.grad = gradient
        python.put_back()


def is_watched(model: nn.Module) -> bool:
    """True where somebody has hooks on parameters, which trials in place would call."""
    return any(any(gradient_hooks_of(parameter)) for parameter in model.parameters())


def fake_batch(batch: Batch, mode: FakeTensorMode, *, is_elsewhere: bool) -> Batch:
    """The same nesting of fake tensors, on the CPU, or where memory is not counted."""
    device = ELSEWHERE if is_elsewhere else "cpu"
    return map_tensors(batch, lambda tensor: fake_like(tensor, mode, device))


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: str = "cpu") -> Tensor:
    """A fake tensor of this shape and dtype; a single number keeps its value, which optimizers read their step from."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"a tensor with layout {tensor.layout} cannot be planned with fake tensors")
    has_number = tensor.dim() == 0 and not _is_without_data(tensor) and device == "cpu"
    number = tensor.detach().item() if has_number else None
    with mode:
        if number is not None:
            fake = torch.tensor(number, dtype=tensor.dtype)
        else:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_()
    return fake


@contextmanager
def choosing_as_real(micro_batches: Iterable[Batch]) -> Iterator[None]:
    """Inside this block transformers leaves the mask of attention out where a real run would.

    Positions that a model counts itself are those of one sequence a row. A real run reads that off their numbers, and needs no
    mask; fake tensors are not asked: a mask is made, and keys and values are repeated to go with it. Batches that bring
    positions are planned with the mask: an upper bound.
    """
    masking = sys.modules.get(_MASKING)
    own = getattr(masking, _FIND_PACKED, None)
    brings_none = all(isinstance(one, Mapping) and "position_ids" not in one for one in micro_batches)
    if own is None or not brings_none:
        yield
        return
    setattr(masking, _FIND_PACKED, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, _FIND_PACKED, own)


def is_real(parts: Parts, batch: Batch) -> bool:
    """True where every tensor holds numbers, so that it could really run."""
    model, _, _ = parts
    return not any(_is_without_data(tensor) for tensor in (*model.parameters(), *model.buffers(), *tensors(batch)))


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Random states, torch's, Python's and NumPy's, are the same after this block as before it."""
    outer = outer_random()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        outer.restore()


def _copied(parts: Parts, memo: dict[int, Any]) -> Parts:
    try:
        return copy.deepcopy(parts, dict(memo))
    except UNCOPYABLE as error:
        shared = _shared(parts)
        if shared:
            return copy.deepcopy(parts, {**memo, **shared})
        model, optimizer, _ = parts
        raise PlanError(
            f"planning tries an update on a copy, but this {type(model).__name__} with {type(optimizer).__name__} cannot be "
            f"copied by copy.deepcopy: {error}. Give plan() a model that can be, such as one made anew."
        ) from error


def _shared(parts: Parts) -> dict[int, Any]:
    """Attributes of modules that nobody can copy, such as locks: copies have the same ones. No tensor is copied to find out."""
    model, _, objective = parts
    loss = getattr(objective, "loss", None)
    tops = [model, loss] if isinstance(loss, nn.Module) else [model]
    known = {id(tensor): tensor for tensor in _large_tensors(parts)}
    found: dict[int, Any] = {}
    for module in (module for top in tops for module in top.modules()):
        for value in vars(module).values():
            if isinstance(value, dict | nn.Module | Tensor):
                continue
            try:
                copy.deepcopy(value, dict(known))
            except UNCOPYABLE:
                found[id(value)] = value
    return found


def _large_tensors(parts: Parts) -> Iterator[Tensor]:
    model, optimizer, objective = parts
    yield from model.parameters()
    yield from model.buffers()
    loss = getattr(objective, "loss", None)
    if isinstance(loss, nn.Module):
        yield from loss.parameters()
        yield from loss.buffers()
    if optimizer is not None:
        for group in optimizer.param_groups:
            yield from group["params"]


def _is_without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
