"""The exact gradient of a model with BatchNorm: all micro-batches forward in lockstep, one backward through all of them."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from anybatch.batches import MicroBatches, join_rows, map_tensors, tensors
from anybatch.errors import UpdateError
from anybatch.events import Accumulate, Backward, Forward, Load, Loss
from anybatch.gradients import GradientSum
from anybatch.norms import Layers, Lockstep, pooled
from anybatch.objectives import Coupled, Metrics, checked_loss
from anybatch.passes.schedules.two_passes import Together, encode, leaf, load, no_rows, rows_of_all, share_out
from anybatch.passes.work import Work, common_device
from anybatch.state import Keeper, Offload, Replay, Spool

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class ExactNorm:
    """One batch through BatchNorm layers that see all of it.

    Every micro-batch runs, those of 0 units too: their rows are part of the statistics. With `drops`, micro-batches whose
    activations or losses are not finite are left out and the rest starts again, because their rows have spoilt everybody's
    statistics; where only the gradient is not finite nobody can say whose it is, and all are left out.
    """

    work: Work
    layers: Layers
    gradient_sum: GradientSum
    coupled: Coupled | None = None
    offload: Offload
    spool: Spool
    scaler: GradScaler | None = None
    drops: bool = False
    _not_finite: set[int] = field(default_factory=set)

    def run(self) -> Together:
        """Add the gradient of the whole batch."""
        _check_compiled(self.work.model, self.layers)
        replay = Replay(self.work.model) if self.drops else None
        before = None if replay is None else replay.now()
        self._load()
        left, dropped = list(range(len(self.work.micro_batches))), list[int]()
        while left:
            attempt = self._attempt if self.coupled is None else partial(self._attempt_coupled, self.coupled)
            outcome = attempt(left)
            if isinstance(outcome, Together):
                return replace(outcome, dropped=sorted(dropped))
            if replay is not None and before is not None:
                replay.go_back(before)
            dropped += outcome
            left = [index for index in left if index not in outcome]
            self._not_finite.clear()
            self.gradient_sum.zero()
        return Together(losses=(), metrics=(), units=(), dropped=sorted(dropped))

    def _attempt(self, indices: list[int]) -> Together | Sequence[int]:
        shares = self.work.shares
        with self._keeper() as keeper:
            results = dict(zip(indices, self._forwards(indices, keeper, _evaluate), strict=True))
            counted = [index for index in shares.running if index in results]
            if not counted:
                return indices
            losses = torch.stack([results[index][0] for index in counted])
            metrics: list[Metrics] = [results[index][1] for index in counted]
            results.clear()
            if self.drops and (bad := self._bad(dict(zip(counted, losses.detach(), strict=True)))):
                return bad
            self._tell_losses(counted, losses.detach())
            starts = shares.tensors(losses, self.scaler)
            if not self._backward(losses, torch.stack([starts[index] for index in counted])):
                return indices
        units = [shares.units[index] for index in counted]
        return Together(losses=losses.detach().unbind(), metrics=metrics, units=units, counted=counted)

    def _attempt_coupled(self, coupled: Coupled, indices: list[int]) -> Together | Sequence[int]:
        with self._keeper() as keeper:
            parts = self._forwards(indices, keeper, partial(_encode, coupled))
            if self.drops and self._not_finite:
                return sorted(self._not_finite)
            num_own, ranks = self.work.shares.num_own, self.work.ranks
            own = join_rows(
                [part if index < num_own else no_rows(part) for index, part in zip(indices, parts, strict=True)]
            )
            leaves = own if ranks.size == 1 else map_tensors(own, leaf)
            with self.work.autocast or nullcontext():
                loss, metrics = checked_loss(coupled.loss(rows_of_all(ranks, leaves)))
            del parts
            loss = loss.float() if loss.itemsize < 4 else loss
            if self.drops and not bool(loss.isfinite()):
                return indices
            units = [self.work.shares.units_of(indices) if ranks.size == 1 else self.work.shares.total]
            start = torch.full_like(loss, self.work.turn.factor)
            if not self._backward(loss, start if self.scaler is None else self.scaler.scale(start)):
                return indices
            if ranks.size > 1:
                share_out(ranks, self.gradient_sum.parameters, [leaves])
                roots = [(root, held.grad) for root, held in zip(tensors(own), tensors(leaves), strict=True)]
                chosen = [(root, grad) for root, grad in roots if root.requires_grad and grad is not None]
                self.gradient_sum.backward([root for root, _ in chosen], [grad for _, grad in chosen])
        return Together(losses=[loss.detach()], metrics=[metrics], units=units)

    def _load(self) -> None:
        tracker = self.work.tracker
        # parameters that are gathered for this batch may lie elsewhere than their parts
        device = common_device(self.work.model.parameters()) or self.work.device
        is_there = all(tensor.device == device for tensor in tensors(self.work.micro_batches))
        work = replace(self.work, device=None if is_there else device)
        loaded = []
        for index in range(len(self.work.micro_batches)):
            if tracker is not None:
                tracker.begin(Load)
            loaded.append(load(work, index))
            if tracker is not None:
                tracker.end(Load, micro_batch=index, batch=loaded[-1])
        self.work = replace(self.work, cut=MicroBatches(loaded, self.work.cut.cut), device=None)

    def _keeper(self) -> Keeper:
        model = self.work.model
        parameters = [*model.parameters(), *self.work.parameters]
        device = parameters[0].device if parameters else torch.device("cpu")
        stay = [*parameters, *model.buffers(), *tensors(self.work.micro_batches)]
        return Keeper(self.offload, stay, device, self.spool)

    def _forwards(self, indices: list[int], keeper: Keeper, forward: Callable[[Work, int], T]) -> list[T]:
        tracker = self.work.tracker
        if tracker is not None:
            tracker.begin(Forward)

        def run(index: int) -> T:
            # an autocast context remembers the state it found: one for each thread
            own = replace(self.work, tracker=None, autocast=copy.copy(self.work.autocast))
            with keeper.hooks():
                return forward(own, index)

        lockstep = Lockstep([partial(run, index) for index in indices], indices)
        not_finite = self._not_finite if self.drops else None
        ranks, num_own = self.work.ranks, self.work.shares.num_own
        with pooled(self.layers, lockstep, not_finite, ranks=ranks, num_own=num_own):
            results = lockstep.run()
        if tracker is not None:
            tracker.end(Forward, output=None)
        return results

    def _bad(self, losses: dict[int, Tensor]) -> list[int]:
        return sorted(self._not_finite) or [index for index, loss in losses.items() if not bool(loss.isfinite())]

    def _tell_losses(self, counted: Sequence[int], losses: Tensor) -> None:
        tracker, shares = self.work.tracker, self.work.shares
        for index, loss in zip(counted, losses, strict=True) if tracker is not None else ():
            assert tracker is not None
            tracker.begin(Loss)
            tracker.end(Loss, micro_batch=index, loss=loss, units=shares.units[index], share=shares.each[index])

    def _backward(self, roots: Tensor, starts: Tensor) -> bool:
        tracker = self.work.tracker
        if tracker is not None:
            tracker.begin(Backward)
        is_finite = self.gradient_sum.backward(roots, starts)
        if tracker is not None:
            tracker.end(Backward)
            tracker.begin(Accumulate)
            tracker.end(Accumulate, parameters=tuple(self.gradient_sum.parameters))
        return is_finite


def _check_compiled(model: nn.Module, layers: Layers) -> None:
    inside = set(layers.values())
    for name, module in model.named_modules():
        is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if is_compiled and not inside.isdisjoint(module.modules()):
            raise UpdateError(
                f"batch_norm='exact': {name or 'the model'} is compiled around BatchNorm layers, and a compiled forward cannot "
                "stop at them to wait for the other micro-batches. Compile the parts between the BatchNorms, or none, or use "
                "batch_norm='micro'."
            )


def _evaluate(work: Work, index: int) -> tuple[Tensor, Metrics]:
    return work.forward(index)


def _encode(coupled: Coupled, work: Work, index: int) -> object:
    return encode(coupled, work, index)
