"""What was alive of each kind of memory, moment by moment."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

MemoryKind = Literal["parameters", "gradients", "optimizer", "inputs", "activations", "temporaries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes of each kind that were alive after one op."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    inputs: int = 0
    activations: int = 0
    temporaries: int = 0
    is_step: bool = False
    """True after the last backward pass, when nothing is left of forwards: gradients are clipped, the optimizer steps."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.kinds.values())

    @property
    def kinds(self) -> dict[MemoryKind, int]:
        """Bytes by kind."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "is_step"}  # type: ignore[misc]


Moments = tuple[Moment, ...]


def highest(moments: Iterable[Moment]) -> Moment:
    """The one with most memory: the peak."""
    return max(moments, key=lambda moment: moment.total, default=Moment())


def sweep(
    changes: dict[int, list[tuple[MemoryKind, int]]], *, num_ops: int, last_backward: int, inputs: int
) -> Moments:
    """The moments after each of `num_ops` ops, less those in which no kind had more than in another one of the same phase.

    `changes` are bytes that came, or went, of a kind, by the number of the op.
    """
    now: dict[Any, int] = dict.fromkeys(MemoryKind.__args__, 0)  # type: ignore[attr-defined]
    now["inputs"] += inputs
    kept: dict[bool, list[tuple[int, ...]]] = {False: [], True: []}
    for op in range(num_ops):
        for kind, nbytes in changes.get(op, ()):
            now[kind] += nbytes
        if op in changes:
            _keep(kept[op > last_backward], tuple(now.values()))
    return tuple(
        Moment(**dict(zip(now, values, strict=True)), is_step=is_step)
        for is_step, some in kept.items()
        for values in some
    )


def _keep(kept: list[tuple[int, ...]], values: tuple[int, ...]) -> None:
    if any(all(own <= other for own, other in zip(values, known, strict=True)) for known in reversed(kept)):
        return
    kept[:] = [known for known in kept if any(own < other for own, other in zip(values, known, strict=True))]
    kept.append(values)
