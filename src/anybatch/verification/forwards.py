"""Forwards of some rows, which leave everything as it was."""

import copy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.batch_norm import Call, batch_norms, replaced, uses_batch_statistics
from anybatch.core import (
    Accumulator,
    Batch,
    BatchNorm,
    Coupled,
    DropoutLayer,
    MovingBuffers,
    NormLayer,
    Objective,
    autocast_context,
    common_device,
    move,
    once_more,
    outer_random,
    random_state,
)
from anybatch.dropout import masks_of, rows_running
from anybatch.errors import ExactnessError
from anybatch.objectives import ObservedMeans, WatchedLoss
from anybatch.parallel import unwrapped
from anybatch.verification.copies import copy_batch, functions_of
from anybatch.verification.python_state import PythonState
from anybatch.verification.sample_losses import Measured, Piece, Sample, measure, measure_rows


class NotJudgedError(ExactnessError):
    """The reason why these rows cannot be judged; caught by `look_first`."""


class Forwards:
    """Forwards of a sample's rows, each from the state in which the first one started."""

    def __init__(self, accumulator: Accumulator, sample: Sample) -> None:
        self.model: nn.Module = unwrapped(accumulator.model)
        self.objective: Objective | Coupled = accumulator.objective
        self.sample = sample
        self._mode: BatchNorm | None = accumulator.running.batch_norm
        self._autocast = accumulator.running.autocast
        self._device = common_device(self.model.parameters())
        self._masks = masks_of(self.model)
        self._norms = RememberedNorms(self.model)
        own_loss = [self.objective.loss] if isinstance(self.objective.loss, nn.Module) else []
        self._buffers = MovingBuffers([self.model, *own_loss])
        self._buffers_before = self._buffers.snapshot()
        self._python = PythonState()
        self._devices = {parameter.device for parameter in self.model.parameters()}
        self._random = random_state(self._devices)
        self._outer = outer_random()
        self._draws: Any = None
        self._has_graph = False
        self._may_have_drawn = True
        """From Python's and NumPy's generators: False once all rows have run and have not."""
        self.changed: list[str] = []
        """Names of Python state that the first forward changed."""

    @contextmanager
    def undone(self) -> Iterator[None]:
        """The block after which everything is as it was."""
        masks = self._masks
        kept = None if masks is None else (masks.strict, masks.is_watched, masks.last)
        dropouts = [module for module in self.model.modules() if _is_stock_dropout(module)]
        try:
            for module in dropouts:
                module.training = False  # without it, rows that draw nothing else are compared as they are
            self._python = PythonState(self.model, *functions_of(self.objective), owned=[*self.model.modules()])
            if masks is not None:
                masks.strict = False  # who draws is seen here
            with warnings.catch_warnings(), _eagerly():
                warnings.simplefilter("ignore")
                yield
        finally:
            once_more(self.put_back)
            if self._may_have_drawn:
                self._outer.restore()
            for module in dropouts:
                module.training = True
            if masks is not None and kept is not None:
                masks.strict, masks.is_watched, masks.last = kept

    def put_back(self) -> None:
        """Make buffers, generators and what Python code changed what they were."""
        self._python.put_back()
        self._buffers.put_back(self._buffers_before)

    def left(self) -> list[str]:
        """Names of what forwards changed outside of the model (closures, globals, default arguments): it is not put back."""
        return self._python.changed(is_left=True)

    def whole(self) -> Measured:
        """All rows in one go. What they draw is kept, where it can be, for the parts to draw again."""
        measured = self._run_whole()
        drawn = self._outer.moved()
        self._may_have_drawn = bool(drawn)
        if drawn:
            raise NotJudgedError(f"the loss draws from {' and '.join(drawn)}, which cannot be drawn again by row")
        if self._random.is_now():
            self.changed = self._python.changed()
            self.put_back()
            return measured
        from anybatch.verification.draws import Draws

        self.put_back()
        self._draws = Draws(self.sample.num_rows)
        measured = self._run_whole()
        self.changed = self._python.changed()
        self.put_back()
        self._refuse_permutations()
        return measured

    def again(self) -> Measured:
        """All rows in one go once more."""
        return self.part(Piece(rows=tuple(range(self.sample.num_rows)), batch=self.sample.batch))

    def after(self, first: Piece, second: Piece) -> Measured:
        """Some rows, after others have run and Python code has kept what it changed; buffers are put back between."""
        self._run(first.batch, first.rows)
        self._buffers.put_back(self._buffers_before)
        return self.part(second)

    def part(self, piece: Piece) -> Measured:
        """Some of the rows."""
        measured = self._run(piece.batch, piece.rows)
        self.put_back()
        if self._draws is not None and self._draws.strange:
            raise NotJudgedError(f"random draws cannot be drawn again by row: {self._draws.strange[0]}")
        return measured

    def _run_whole(self) -> Measured:
        try:
            return self._run(self.sample.batch, None)
        except RuntimeError:
            if self._has_graph:
                raise
            self._has_graph = True  # a loss that takes gradients itself: no backward pass runs even so
            self.put_back()
            return self._run(self.sample.batch, None)

    def _run(self, given: Batch, rows: Sequence[int] | None) -> Measured:
        numbers = range(self.sample.num_rows) if rows is None else rows
        batch = copy_batch(given)  # a forward may write into it
        batch = batch if self._device is None else move(batch, self._device)
        objective = self.objective
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_graph or _needs_graph(objective)))
            if self._autocast is not None:
                stack.enter_context(copy.copy(autocast_context(self._autocast, self._device)))
            if self._norms.layers:
                stack.enter_context(self._norms.running(self._mode, is_first=rows is None))
            if self._draws is not None:
                stack.enter_context(self._drawing(rows))
            if self._masks is not None:
                stack.enter_context(rows_running(self.model, numbers))
            if isinstance(objective, Coupled):
                return measure_rows(objective.encode(self.model, batch))
            observed = stack.enter_context(ObservedMeans())
            return measure(objective, self.model, batch, objective.loss(self.model, batch), observed)

    def _drawing(self, rows: Sequence[int] | None) -> AbstractContextManager[None]:
        from anybatch.verification.draws import recording, replaying

        if rows is None:
            self._draws.whole.clear()
            return recording(self._draws)
        return replaying(self._draws, rows)

    def _refuse_permutations(self) -> None:
        """Drawn numbers that are themselves numbers of rows mean other rows in a part."""
        for draw in self._draws.whole:
            is_whole = not draw.numbers.is_floating_point() and draw.numbers.dtype is not torch.bool
            if is_whole and ("randperm" in draw.operation or "multinomial" in draw.operation):
                raise NotJudgedError(f"{draw.operation} draws an order or a choice among the rows")
            if (
                is_whole
                and not draw.numbers.is_cpu
                and draw.numbers.numel()
                and draw.numbers.max() < self.sample.num_rows
            ):
                raise NotJudgedError(f"{draw.operation} may draw numbers of rows")


def _is_stock_dropout(module: nn.Module) -> bool:
    """True of torch's own layers that draw; those that were swapped draw by row."""
    return isinstance(module, DropoutLayer) and type(module).__module__.startswith("torch.nn.") and module.training


def _needs_graph(objective: Objective | Coupled) -> bool:
    """True if the divisor of the loss is observed: that needs means with a gradient."""
    return isinstance(objective.loss, WatchedLoss)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Compiled parts run as they are written: a few rows are no shapes to compile for."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class RememberedNorms:
    """BatchNorm layers of a model that normalise any rows by the statistics of all of them.

    The first forward keeps its statistics, layer by layer and call by call, and later ones use them: rows are judged as
    `batch_norm="exact"` has them, and whatever else couples them is seen. Running statistics do not move.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {name: layer for name, layer in batch_norms(model).items() if uses_batch_statistics(layer)}
        self._statistics: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def running(self, mode: BatchNorm | None, *, is_first: bool) -> AbstractContextManager[None]:
        """A forward with the running statistics if they are frozen; else the first one, or one of some of its rows."""
        if is_first:
            self._statistics = {name: [] for name in self.layers}
        left = {name: iter(kept) for name, kept in self._statistics.items()}

        def compute(name: str, layer: NormLayer, call: Call) -> Tensor:
            if mode == "frozen":
                assert call.running_mean is not None
                assert call.running_var is not None
                return _normalised(call, call.running_mean, call.running_var)
            if not is_first:
                return _normalised(call, *next(left[name]))
            dims = [dim for dim in range(call.input.dim()) if dim != 1]
            inputs = call.input.float() if call.input.itemsize < 4 else call.input
            var, mean = torch.var_mean(inputs, dims, correction=0)
            self._statistics[name].append((mean, var))
            return _normalised(call, mean, var)

        return replaced(self.layers, compute)


def _normalised(call: Call, mean: Tensor, var: Tensor) -> Tensor:
    like = next(held for held in (call.running_mean, call.weight, call.input) if held is not None)
    mean, var = mean.to(like.dtype), var.to(like.dtype)
    return F.batch_norm(call.input, mean, var, call.weight, call.bias, False, 0.0, call.eps)
