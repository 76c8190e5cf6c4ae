"""What BatchNorm does when a batch is cut: exact, by micro-batch, or frozen; and the warning where nobody chose."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal, get_args

from torch import Tensor, nn
from torch.amp import GradScaler

from anybatch.batches import Batch
from anybatch.errors import ParallelError, UpdateError
from anybatch.gradients import GradientSum
from anybatch.norms import Layers, Merging, batch_norms, frozen, merged, uses_batch_statistics
from anybatch.objectives import Coupled, Metrics
from anybatch.parallel import Ranks, sum_by_hand
from anybatch.passes.schedules import ExactNorm, Together, run_coupled
from anybatch.passes.work import Work
from anybatch.state import Offload, Replay, Spool, check_offload

BatchNorm = Literal["exact", "micro", "frozen"]


class NormPolicy:
    """How the BatchNorm layers of one model see a batch that is cut; None is `"micro"` with one warning."""

    def __init__(self, model: nn.Module, mode: BatchNorm | None, offload: Offload) -> None:
        if mode is not None and mode not in get_args(BatchNorm):
            raise UpdateError(f"batch_norm={mode!r}: expected one of {', '.join(get_args(BatchNorm))}, or None.")
        check_offload(offload)
        self.mode = mode
        self.offload = offload
        self._spool = Spool()
        self._layers = batch_norms(model)
        self._is_told = mode is not None

    def layers(self, work: Work) -> Layers:
        """The layers whose statistics the cut touches: none where the batch is one micro-batch, or the model has none."""
        if not self._layers or (not work.is_cut and self.mode != "frozen"):
            return {}
        return {name: layer for name, layer in self._layers.items() if uses_batch_statistics(layer)}

    def is_exact(self, work: Work) -> bool:
        """True where this batch has to go in lockstep."""
        return self.mode == "exact" and bool(self.layers(work))

    @contextmanager
    def around(self, work: Work, gradient_sum: GradientSum, scaler: GradScaler | None) -> Iterator[Work]:
        """The block in which micro-batches run one by one: statistics frozen, or merged at its end."""
        layers = self.layers(work)
        if not layers:
            yield work
        elif self.mode == "frozen":
            with frozen(layers):
                yield work
        else:
            with self._measured(layers, work, gradient_sum, scaler, None), merged(layers, work.ranks) as merging:
                yield _telling(work, merging)

    def run_together(
        self,
        work: Work,
        gradient_sum: GradientSum,
        *,
        coupled: Coupled | None,
        scaler: GradScaler | None,
        drops: bool,
    ) -> Together:
        """Add the gradient of a batch that cannot run micro-batch by micro-batch: a coupled loss, exact BatchNorm, or both."""
        layers = self.layers(work)
        if coupled is None or (self.mode == "exact" and layers):
            exact = ExactNorm(
                work=work,
                layers=layers,
                gradient_sum=gradient_sum,
                coupled=coupled,
                offload=self.offload,
                spool=self._spool,
                scaler=scaler,
                drops=drops,
            )
            with work.turn.together():
                return exact.run()
        if not layers:
            return run_coupled(coupled, work, gradient_sum, scaler=scaler, drops=drops)
        if self.mode == "frozen":
            with frozen(layers):
                return run_coupled(coupled, work, gradient_sum, scaler=scaler, drops=drops)
        with self._measured(layers, work, gradient_sum, scaler, coupled):
            return run_coupled(
                coupled,
                work,
                gradient_sum,
                scaler=scaler,
                drops=drops,
                first_pass=lambda: _beginning(layers, work.ranks),
            )

    def alone(self) -> AbstractContextManager[object]:
        """The block in which one micro-batch can run by itself, to be looked at; a single row has no statistics of its own."""
        has_running = {name: layer for name, layer in self._layers.items() if layer.running_mean is not None}
        return nullcontext() if self.mode in (None, "micro") else frozen(has_running)

    @contextmanager
    def _measured(
        self,
        layers: Layers,
        work: Work,
        gradient_sum: GradientSum,
        scaler: GradScaler | None,
        coupled: Coupled | None,
    ) -> Iterator[None]:
        """The block of a batch whose gradient is compared with the exact one, and the difference told; once."""
        if self._is_told:
            yield
            return
        exact = self._exact_gradient(layers, work, scaler, coupled)
        yield
        if isinstance(exact, Exception):
            size = f"could not be measured ({type(exact).__name__}: {exact})"
        else:
            difference = _difference(gradient_sum, exact)
            if not math.isfinite(difference):
                return  # the next batch will tell more
            size = f"is {difference:.2g} of its size"
        self._is_told = True
        warnings.warn(
            f"{len(layers)} BatchNorm layers in training mode saw {_num_micro_batches(work)} micro-batches, each with its own "
            f"statistics: the error of this batch's gradient {size}. Use batch_norm='exact' for the whole batch's gradient, or "
            "batch_norm='micro' to keep this without the warning.",
            stacklevel=9,
        )

    def _exact_gradient(
        self, layers: Layers, work: Work, scaler: GradScaler | None, coupled: Coupled | None
    ) -> list[Tensor | None] | Exception:
        """What the exact pass would leave in `.grad`; gradients, buffers and random state are left as they are."""
        replay = Replay(work.model)
        before = replay.now()
        quiet = replace(work, tracker=None)
        scratch = GradientSum(work.parameters)
        try:
            if work.agreed is not None and work.agreed.num_passes:
                return ParallelError("not under fully_shard")
            with scratch.undone(), work.turn.together():
                ExactNorm(
                    work=quiet,
                    layers=layers,
                    gradient_sum=scratch,
                    coupled=coupled,
                    offload=self.offload,
                    spool=self._spool,
                    scaler=scaler,
                ).run()
                sum_by_hand(work.ranks, scratch.parameters, divisor=work.turn.factor)
                scale = 1.0 if coupled is not None else work.shares.left_over(work.shares.total)
                return [None if p.grad is None else p.grad.detach().to_dense() * scale for p in scratch.parameters]
        except Exception as error:  # a model that cannot go in lockstep is no reason not to train it
            return error.with_traceback(None)
        finally:
            replay.go_back(before)


def _num_micro_batches(work: Work) -> int:
    return len(work.micro_batches) if work.agreed is None else sum(work.agreed.micro_batches)


@contextmanager
def _beginning(layers: Layers, ranks: Ranks) -> Iterator[Callable[[], None]]:
    with merged(layers, ranks) as merging:
        yield merging.begin


def _difference(gradient_sum: GradientSum, exact: list[Tensor | None]) -> float:
    """|g - exact| / |exact|"""
    wrong = size = 0.0
    for parameter, wanted in zip(gradient_sum.parameters, exact, strict=True):
        if wanted is not None:
            got = (
                wanted.new_zeros(())
                if parameter.grad is None
                else parameter.grad.detach().to_dense() * gradient_sum.scale
            )
            wrong += float((got - wanted).double().square().sum())
            size += float(wanted.double().square().sum())
    return float((wrong / size) ** 0.5) if size else 0.0


def _telling(work: Work, merging: Merging) -> Work:
    """The same work, which tells when a micro-batch begins, and when one is dropped."""
    objective = work.objective

    def loss(model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Metrics]:
        merging.begin()
        return objective.loss(model, batch)

    return replace(work, objective=replace(objective, loss=loss), forget=merging.forget)
