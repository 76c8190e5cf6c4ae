"""Where rows first look at each other: in the objective's own preparation of inputs, or in which layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anybatch.batches import Batch, tensors
from anybatch.proof.causes.experiments import Experiments
from anybatch.proof.floor import largest_floor

Key = tuple[str, str, int]
"""Name of a module, what it is, and the number of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingPlace:
    """Where it was seen, and what to do there."""

    told: str
    fix: str


def first_that_mixes(experiments: Experiments) -> MixingPlace | None:
    """The first input or output, in the order they are made, that depends for some rows on which other rows are there.

    The first rows and the last are looked at: what looks back only, as a cumulative sum does, leaves the first as they are.
    """
    case = experiments.case
    whole = _SeenRows(case.num_rows)
    case.once(case.batch, range(case.num_rows), whole.watch)
    found: set[Key] = set()
    for place in (0, len(experiments.cut) - 1):
        rows = experiments.cut.row_numbers[place]
        part = _SeenRows(len(rows))
        case.once(experiments.cut[place], rows, part.watch)
        found |= {
            key for key, full in whole.tensors.items() if _differs(experiments, full, part.tensors.get(key), rows)
        }
    first = next((key for key in whole.tensors if key in found), None)
    return None if first is None else _place(first, whole.modules[first[0]])


def _differs(experiments: Experiments, full: Tensor, some: Tensor | None, rows: tuple[int, ...]) -> bool:
    return some is not None and full.shape[1:] == some.shape[1:] and not same_rows(experiments, full, some, rows)


def same_rows(experiments: Experiments, full: Tensor, some: Tensor, rows: tuple[int, ...]) -> bool:
    """Whether `some` is what these rows have in `full`, up to rounding."""
    wanted = full[list(rows)].double()
    if wanted.shape != some.shape:
        return False
    return float((some.double() - wanted).norm()) <= largest_floor(experiments.floor.unit) * float(wanted.norm())


def _place(key: Key, module: nn.Module) -> MixingPlace:
    name, what, _ = key
    if what == "input":
        return MixingPlace(
            told=f"They do so before the model: what {name or 'the model itself'!r} is given for a row depends on the others, "
            "because the objective prepares its inputs from all rows (a mean, a standard deviation, an order).",
            fix="Prepare the inputs row by row, or in the loader, before the batch is cut; or with statistics that are fixed "
            "before training.",
        )
    told = f"They do so in the model, first in {name or 'the model itself'!r} ({what})."
    if getattr(module, "batch_first", True) is False:
        return MixingPlace(
            told=f"{told} It takes time first (batch_first=False), and reads the rows as time.",
            fix=f"Make it {what}(..., batch_first=True); or give the batch time first, with micro_batch=Rows(n, batch_dim=1).",
        )
    return MixingPlace(
        told=told,
        fix="Take what looks across rows out of the model into the loss of Coupled(encode, loss), or use a layer that looks at "
        "one row at a time.",
    )


class _SeenRows:
    """What modules were given and returned, rows first, in the order it was made."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.tensors: dict[Key, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self.modules[name] = module
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, named: Any) -> None:
            if not any(key[1] != "input" for key in self.tensors):  # what no layer has made yet, the objective has
                self._keep(name, "input", [*inputs, *named.values()])

        return hook

    def _after(self, name: str) -> Callable[[nn.Module, Any, Batch], None]:
        def hook(module: nn.Module, inputs: Any, output: Batch) -> None:
            self._keep(name, type(module).__name__, output)

        return hook

    def _keep(self, name: str, what: str, values: Batch) -> None:
        for tensor in tensors(values):
            if tensor.dim() > 0 and tensor.shape[0] == self._num_rows and tensor.is_floating_point():
                number = sum(key[:2] == (name, what) for key in self.tensors)
                self.tensors[name, what, number] = tensor.detach().clone()
