"""`Terms`: several mean losses from one forward, each divided by its own units."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from anybatch.core import Batch, Metrics, Objective, TermLosses, Units, count_terms, num_rows
from anybatch.errors import LossError

TermFunction = Callable[[nn.Module, Batch], "Mapping[str, Tensor] | tuple[Mapping[str, Tensor], Metrics]"]


def Terms(  # noqa: N802 - it reads as what it makes
    loss: TermFunction,
    *,
    units: Mapping[str, Units | None],
    weights: Mapping[str, float] | None = None,
) -> Objective:
    """Make the objective `sum_t weights[t] * mean_t`, in which each mean has its own units.

    Each term is reported as a metric under its name, without its weight. A term with no units in a micro-batch does not
    count there. The units reported are the rows of micro-batches with units in any term.

    Args:
        loss: Function of (model, batch) that returns a dict of mean losses by name, or `(dict, metrics)`.
        units: By name, a function of the batch that returns what this mean divides by. None marks a penalty that is no mean
            over rows, such as a norm of the weights; it counts once.
        weights: Factors by name; 1 by default.

    Returns:
        An objective for `Update` and `Accumulator`.

    Raises:
        LossError: If an argument is of another type, or the names of weights, units and losses differ.

    >>> import torch
    >>> from anybatch import Accumulator, rows
    >>> objective = Terms(
    ...     lambda model, x: {"fit": (model(x) - 1).square().mean(), "small": model.weight.square().sum()},
    ...     units={"fit": rows, "small": None},
    ...     weights={"small": 0.1},
    ... )
    >>> sorted(Accumulator(nn.Linear(3, 1), objective, micro_batch=4).backward(torch.randn(10, 3)).metrics)
    ['fit', 'small']
    """
    _check(loss, units, weights or {})
    scales = dict.fromkeys(units, 1.0) | dict(weights or {})

    def losses(model: nn.Module, batch: Batch) -> TermLosses:
        given, metrics = _losses_and_metrics(loss(model, batch), units)
        return TermLosses(losses=given, weights=scales, units=units, metrics=metrics, batch=batch)

    def counted_rows(batch: Batch) -> float:
        return num_rows(batch) if any(count > 0 for count in count_terms(units, batch)) else 0

    return Objective(losses, counted_rows, terms=units)  # type: ignore[arg-type]


def _check(loss: Any, units: Any, weights: Any) -> None:
    if not callable(loss):
        raise LossError(
            f"Terms({loss!r:.60}): expected a function loss(model, batch) that returns a dict of mean losses."
        )
    if not isinstance(units, Mapping) or not units:
        raise LossError(
            f"Terms(units={units!r:.80}): expected a dict of functions of the batch by the name of the term, such as "
            "{'tokens': lambda batch: (batch['labels'] != -100).sum(), 'rows': anybatch.rows, 'penalty': None}."
        )
    for name, count in units.items():
        if count is not None and not callable(count):
            raise LossError(
                f"Terms(units={{{name!r}: {count!r:.40}}}): expected a function of the batch, or None for a penalty that is "
                "counted once."
            )
    for name, weight in weights.items():
        if name not in units:
            raise LossError(
                f"Terms(weights=...) names {name!r}, which units do not: {', '.join(map(repr, units))}. Give its units too."
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise LossError(f"Terms(weights={{{name!r}: {weight!r:.40}}}): expected a number.")


def _losses_and_metrics(returned: Any, units: Mapping[str, object]) -> tuple[Mapping[str, Tensor], Metrics]:
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    losses, metrics = returned if is_pair else (returned, {})
    if not isinstance(losses, Mapping) or not isinstance(metrics, Mapping):
        raise LossError(
            f"the loss of Terms returned {type(returned).__name__} {returned!r:.60}; expected a dict of mean losses by name, "
            "or (dict, metrics)."
        )
    if set(losses) != set(units):
        raise LossError(
            f"the loss of Terms returned terms {', '.join(map(repr, losses))}, but units are given for "
            f"{', '.join(map(repr, units))}. Give units for each, and return each: units=None for what is counted once."
        )
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise LossError(f"the term {name!r} is of {what}; expected a tensor of one number, its mean.")
    return {name: losses[name].reshape(()) for name in units}, metrics
