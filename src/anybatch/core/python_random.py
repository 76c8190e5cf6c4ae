"""The random states outside torch: Python's, and NumPy's where it is loaded."""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OuterRandom:
    """Where the generators `random` and `numpy.random` were at one moment."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None
    """In plain values; None where NumPy was not loaded."""

    def restore(self) -> None:
        """Make the generators go on from here; NumPy's is left alone where it was not loaded at that moment."""
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            name, keys, *rest = self.numpy
            numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))

    def moved(self) -> list[str]:
        """The generators that have been drawn from since, by the names under which they are imported."""
        now = outer_random()
        pairs = {"random": (self.python, now.python), "numpy.random": (self.numpy, now.numpy)}
        return [name for name, (before, after) in pairs.items() if before is not None and before != after]

    def as_values(self) -> dict[str, Any]:
        """The same as values that `torch.load(weights_only=True)` takes."""
        return {"python": self.python} | ({} if self.numpy is None else {"numpy": self.numpy})

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> "OuterRandom":
        """What `as_values` gave; other entries are left alone."""
        return cls(values["python"], values.get("numpy"))


def outer_random() -> OuterRandom:
    """Where the generators are now."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return OuterRandom(random.getstate(), None)
    name, keys, *rest = numpy.random.get_state()
    return OuterRandom(random.getstate(), (name, keys.tolist(), *rest))
