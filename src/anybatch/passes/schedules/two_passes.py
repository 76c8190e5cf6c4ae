"""Losses whose rows look at each other, from micro-batches: representations first, then their gradient, then the encoder.

    representations of all micro-batches, without a graph  ->  loss over all rows  ->  its gradient by representation
    ->  every micro-batch forward again, with the random state of the first time, and backward from that gradient

This is the chain rule cut at the representations, so it is exact. The last micro-batch's graph is kept from the first pass:
one forward saved.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from anybatch.batches import Batch, join_rows, map_tensors, move, tensors
from anybatch.errors import LossError
from anybatch.events import Accumulate, Backward, ForwardBoundary, Load, Loss
from anybatch.gradients import GradientSum
from anybatch.objectives import Coupled, Metrics, checked_loss
from anybatch.parallel import Ranks
from anybatch.passes.work import Work
from anybatch.state import Moment, Replay

FirstPass = Callable[[], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """What a batch whose rows look at each other left behind, beside its gradient."""

    losses: Sequence[Tensor]
    metrics: Sequence[Metrics]
    units: Sequence[float]
    """What each of `losses` averaged over."""
    counted: Sequence[int] | None = None
    """Numbers of the micro-batches with these shares in the sum; None where shares had no part in it."""
    dropped: Sequence[int] = ()


@dataclass(slots=True)
class _Part:
    """One micro-batch between its two passes."""

    index: int
    before: Moment | None
    """Where its first pass started; None where nothing has to be run again."""
    representations: Batch
    """With its graph for the last micro-batch, without for the others."""
    leaves: Batch = None
    """The same representations as the start of the loss's graph: their `.grad` is what the second pass starts from."""
    counts: bool = True
    """False of one whose rows the loss does not see: it runs only because other ranks do."""

    def roots(self, representations: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that backward starts from, and their gradients."""
        pairs = list(zip(tensors(representations), tensors(self.leaves), strict=True))
        for again, leaf in pairs:
            if again.shape != leaf.shape:
                raise LossError(
                    f"encode gave shape {tuple(leaf.shape)} for micro-batch {self.index}, and {tuple(again.shape)} when it ran "
                    "again. It must depend on the model, the rows and torch's random state only."
                )
        chosen = [(again, leaf.grad) for again, leaf in pairs if again.requires_grad and leaf.grad is not None]
        return [again for again, _ in chosen], [grad for _, grad in chosen if grad is not None]


def run_coupled(
    coupled: Coupled,
    work: Work,
    gradient_sum: GradientSum,
    *,
    scaler: GradScaler | None = None,
    drops: bool = False,
    first_pass: FirstPass = lambda: nullcontext(lambda: None),
) -> Together:
    """Add the gradient of the coupled loss over all micro-batches of `work`.

    `first_pass()` surrounds the pass that counts, as far as running statistics go, and gives a function to call before each
    micro-batch; what the second pass changes is put back. With
    `drops`, micro-batches with representations or gradients that are not finite are left out and the rest starts again:
    the loss must not see them either.
    """
    passes = _Passes(coupled, work, gradient_sum, scaler, drops)
    left = list(range(len(work.micro_batches)))
    dropped: list[int] = []
    while left:
        outcome = passes.run(left, first_pass())
        if isinstance(outcome, Together):
            units = [work.shares.total if work.agreed is not None else work.shares.units_of(left)]
            return Together(losses=outcome.losses, metrics=outcome.metrics, units=units, dropped=sorted(dropped))
        dropped += outcome
        gradient_sum.zero()
        left = [index for index in left if index not in outcome]
    return Together(losses=(), metrics=(), units=(), dropped=sorted(dropped))


@dataclass(slots=True)
class _Passes:
    """The two passes over the micro-batches of one batch."""

    coupled: Coupled
    work: Work
    gradient_sum: GradientSum
    scaler: GradScaler | None
    drops: bool
    replay: Replay = field(init=False)

    def __post_init__(self) -> None:
        self.replay = Replay(self.work.model)

    def run(self, indices: list[int], first_pass: AbstractContextManager[Callable[[], None]]) -> Together | list[int]:
        """Both passes over these micro-batches; the numbers of those that were not finite, where `drops` says to look."""
        begin = self.replay.now() if self.drops else None
        shares, agreed = self.work.shares, self.work.agreed
        again = [indices[-1]] * (0 if agreed is None else agreed.num_passes - len(indices))
        # those that run again come first: the last one's graph is kept
        runs = [(index, False) for index in again] + [(index, index < shares.num_own) for index in indices]
        with first_pass as tell:
            parts = [
                self._first(index, tell, counts=counts, is_last=place == len(runs))
                for place, (index, counts) in enumerate(runs, start=1)
            ]
        bad = [part.index for part in parts if self.drops and not _is_finite(part.representations)]
        if not bad:
            loss, metrics, is_finite = self._loss(parts)
            if is_finite:
                done = self.replay.now()
                bad = self._second(parts)
                self.replay.go_back(done)
            else:
                bad = indices
        if not bad:
            return Together(losses=(loss,), metrics=(metrics,), units=())
        if begin is not None:
            self.replay.go_back(begin)
        return list(bad)

    def _first(self, index: int, tell: Callable[[], None], *, counts: bool, is_last: bool) -> _Part:
        tell()
        before = None if is_last else self.replay.now()
        with (
            torch.set_grad_enabled(is_last and torch.is_grad_enabled()),
            self.work.turn.running(is_last=False),
        ):
            representations = self._encode(index)
        if not counts:
            self.work.forget()
        held = representations if is_last else map_tensors(representations, _alone)
        return _Part(index, before, held, counts=counts)

    def _loss(self, parts: list[_Part]) -> tuple[Tensor, Metrics, bool]:
        """The loss of all rows, detached, with its gradient left in the parts' leaves; False where it is not finite."""
        _check_graph(self.coupled, parts[-1].representations)
        tracker = self.work.tracker
        if tracker is not None:
            tracker.begin(Loss)
        for part in parts:
            part.leaves = map_tensors(part.representations, leaf)
        self.work.meeting.hold()
        seen = [part.leaves if part.counts else no_rows(part.leaves) for part in parts]
        with self.work.autocast or nullcontext():
            loss, metrics = checked_loss(self.coupled.loss(rows_of_all(self.work.ranks, join_rows(seen))))
        loss = loss.float() if loss.itemsize < 4 else loss
        if tracker is not None:
            tracker.end(Loss, loss=loss.detach(), units=sum(self.work.shares.units), share=1.0)
        if self.drops and not bool(loss.isfinite()):
            return loss.detach(), metrics, False
        start = torch.full_like(loss, self.work.turn.factor)
        is_finite = self.gradient_sum.backward(loss, start if self.scaler is None else self.scaler.scale(start))
        share_out(self.work.ranks, self.gradient_sum.parameters, [part.leaves for part in parts])
        return loss.detach(), metrics, is_finite

    def _second(self, parts: list[_Part]) -> list[int]:
        """Backward through every micro-batch, the last first, whose graph is there; those that were not finite."""
        last = parts.pop()
        with self.work.turn.running(is_last=not parts):
            bad = self._backward(last, last.representations)
        last.representations = last.leaves = None  # its graph must not live beside the next one
        for place, part in enumerate(parts, start=1):
            assert part.before is not None
            self.replay.go_back(part.before)
            with self.work.turn.running(is_last=place == len(parts)):
                bad += self._backward(part, self._encode(part.index))
        return bad

    def _backward(self, part: _Part, representations: Batch) -> list[int]:
        roots, grads = part.roots(representations)
        tracker = self.work.tracker
        if tracker is not None:
            tracker.begin(Backward)
        is_finite = not roots or self.gradient_sum.backward(roots, grads)
        if tracker is not None:
            tracker.end(Backward, micro_batch=part.index)
            tracker.begin(Accumulate)
            tracker.end(Accumulate, micro_batch=part.index, parameters=tuple(self.gradient_sum.parameters))
        return [] if is_finite else [part.index]

    def _encode(self, index: int) -> Batch:
        work = self.work
        if work.tracker is None:
            return encode(self.coupled, work, index)
        work.tracker.begin(Load)
        micro_batch = load(work, index)
        work.tracker.end(Load, micro_batch=index, batch=micro_batch)
        with ForwardBoundary(work.tracker, work.model, index):
            return encode(self.coupled, work, index, micro_batch)


def no_rows(representations: Batch) -> Batch:
    """The same nesting with no row of its own, and the graph to get zero gradients from."""
    return map_tensors(representations, lambda tensor: tensor[:0] if tensor.dim() > 0 else tensor)


def rows_of_all(ranks: Ranks, own: Batch) -> Batch:
    """The representations of every rank's rows, by rank; gradients reach this rank's own. 0-dim tensors are its own."""
    if ranks.size == 1:
        return own
    _check_tensors(own)
    counts = ranks.gather([len(tensor) for tensor in tensors(own) if tensor.dim() > 0])
    columns = iter(list(zip(*counts, strict=True)))
    return map_tensors(
        own, lambda tensor: ranks.all_rows(tensor, [int(n) for n in next(columns)]) if tensor.dim() > 0 else tensor
    )


def share_out(ranks: Ranks, parameters: Sequence[nn.Parameter], leaves: Sequence[Batch]) -> None:
    """Every rank computed the one loss, and so has its own parameters' whole gradient: leave each its part of the sum."""
    if ranks.size == 1:
        return
    held = [tensor.grad for nest in leaves for tensor in tensors(nest) if tensor.dim() == 0]
    for grad in [*held, *(parameter.grad for parameter in parameters)]:
        if grad is not None:
            grad.div_(ranks.size)


def _check_tensors(representations: Batch) -> None:
    """Lists of strings or numbers, one per row, are not gathered over ranks."""
    for item in representations if isinstance(representations, list | tuple) else ():
        if isinstance(item, str | int | float):
            raise LossError(
                f"encode returned a list that holds {item!r:.40}; over several ranks only tensors are gathered. Return labels "
                "and the like as tensors, one entry per row."
            )


def load(work: Work, index: int) -> Batch:
    """One micro-batch, where the model is."""
    micro_batch = work.micro_batches[index]
    return micro_batch if work.device is None else move(micro_batch, work.device)


def encode(coupled: Coupled, work: Work, index: int, loaded: Batch = None) -> Batch:
    """The representations of one micro-batch."""
    with work.autocast or nullcontext(), work.at(index):
        return coupled.encode(work.model, load(work, index) if loaded is None else loaded)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without what it was cut from: the first position of every row must not keep all positions alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def leaf(tensor: Tensor) -> Tensor:
    """The tensor as the start of a graph of its own."""
    return _alone(tensor.detach()).requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _is_finite(representations: Batch) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors(representations))


def _check_graph(coupled: Coupled, representations: Batch) -> None:
    held = list(tensors(representations))
    if not held:
        raise LossError(
            f"encode returned {type(representations).__name__} without a tensor; expected representations, rows first: "
            "a tensor or a nesting of tensors."
        )
    if not any(tensor.requires_grad for tensor in held) and not coupled.parameters():
        raise LossError(
            "the representations do not depend on any parameter that requires a gradient. Check that the model is not "
            "frozen whole, and that encode neither detaches its output nor runs under torch.no_grad()."
        )
