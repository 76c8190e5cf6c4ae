"""Causes in the rows: rows that depend on each other or belong together, losses that are not additive, padding."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import Batch, Coupled, MicroBatches, Rows, take_rows, tensors
from anybatch.verification.case import BestWeights, Experiments, best_weights, cut_by_rows, flat, uneven_cut
from anybatch.verification.floor import largest_floor
from anybatch.verification.state import copy_model
from anybatch.verification.verdict import Cause

ON_OUTPUTS = (
    "Give Coupled(encode, loss): encode(model, batch) returns the model's outputs with the targets of the rows, such as "
    "(model(batch[0]), batch[1]), and loss takes those of all rows and returns the number."
)


def find_uneven_touch(experiments: Experiments) -> Cause | None:
    """Compare which parameters get a gradient from the whole batch and from each micro-batch."""
    whole = experiments.floor.whole.parameters
    each = [gradient.parameters for gradient in experiments.each_alone()]
    for name, grad in whole.items():
        by = [index for index, parameters in enumerate(each) if parameters[name] is not None]
        if bool(by) != (grad is not None):
            takes = "none" if not by else f"micro-batches {', '.join(map(str, by))} of {len(each)}"
            return Cause(
                kind="touched",
                explanation=f"{name!r} gets a gradient from {takes}, and from the whole batch "
                f"{'one' if grad is not None else 'none'}: the forward decides for all of its rows together which way "
                "they go.",
                fix="Decide row by row, by torch.where or by indexing the rows that go each way, so that a row's way "
                "does not depend on its neighbours.",
            )
    return None


def find_penalty(experiments: Experiments) -> Cause | None:
    """Look for a penalty that a sum adds once per micro-batch: its error grows by the same with each one more."""
    objective = experiments.objective
    if objective is None or objective.reduction != "sum" or objective.terms:
        return None
    count = experiments.case.num_rows
    errors = []
    for parts in (2, 3):
        stops = [round(count * part / parts) for part in range(parts + 1)]
        cut = cut_by_rows(experiments.case.batch, [range(start, stop) for start, stop in pairwise(stops)])
        gradient = experiments.case.accumulated(cut).parameters
        pairs = [(gradient[name], grad) for name, grad in experiments.floor.whole.parameters.items()]
        known = [(one, other, one if other is None else other) for one, other in pairs]
        apart = [flat(one, like) - flat(other, like) for one, other, like in known if like is not None]
        errors.append(torch.cat(apart))
    once, twice = errors
    if not float((twice - 2 * once).norm()) <= 1e-6 * float(twice.norm()):
        return None
    return Cause(
        kind="not_additive",
        explanation="The loss is a sum over rows with a penalty beside it, which every micro-batch adds once more: with one "
        "micro-batch more the error grows by the same again.",
        fix="Give Terms(loss, units={'rows': ..., 'penalty': None}) with the penalty as a term of its own, which is counted "
        "once per batch; or put it into the optimizer (weight_decay=).",
    )


def find_coupling(experiments: Experiments) -> Cause | None:
    """Find whether any weights make the micro-batches' gradients the whole batch's, and what couples rows if not."""
    objective = experiments.case.objective
    if isinstance(objective, Coupled):
        return _in_encode(experiments, objective)
    best = best_weights(experiments)
    if best is not None and best.is_unique and best.fits:
        if best.is_mean and not _depend_on_parameters(experiments, best):
            return None
        weights = ", ".join(f"{weight:.3f}" for weight in best.weights)
        why = "which depends on the losses themselves" if abs(sum(best.weights) - 1) < 1e-6 else "which is not 1 in all"
        return Cause(
            kind="not_additive",
            explanation="The loss is not additive over rows: it is a function of a mean (a root, a logarithm, a power), or a "
            f"ratio. The micro-batches' gradients would have to weigh {weights}, {why}, so that no units are right.",
            fix=ON_OUTPUTS,
        )
    left = "" if best is None else f" (the best leaves {best.residual:.2g} of it)"
    text = f"Rows look at each other: no weighting of the micro-batches' gradients gives the whole batch's{left}."
    in_model = _in_the_model(experiments, text)
    if in_model is not None:
        return in_model
    if is_of_few_means(experiments):
        return Cause(
            kind="not_additive",
            explanation="The loss is not additive over rows: it is a function of several means or sums over them, such as a "
            f"ratio or a product. No weighting of the micro-batches' gradients gives the whole batch's{left}, and the model's "
            "outputs do not look at each other, so it is the loss that does.",
            fix=ON_OUTPUTS,
        )
    return Cause(
        kind="coupled",
        explanation=f"{text} The model's outputs do not, so it is the loss that does.",
        fix="Give the loss as Coupled(encode, loss): encode(model, batch) returns the representations of the rows, "
        "loss(representations) one number for all of them. info_nce() and clip_loss() are there.",
    )


def unknown_weights(experiments: Experiments) -> str:
    """Say which weights would be right, for a cause that no experiment found."""
    best = None if experiments.objective is None else best_weights(experiments)
    if best is None or not best.fits or not best.is_unique:
        return ""
    sizes = ", ".join(str(len(rows)) for rows in experiments.cut.row_numbers)
    return f" Micro-batches of {sizes} rows should weigh {', '.join(f'{weight:.4f}' for weight in best.weights)}."


def is_of_few_means(experiments: Experiments) -> bool:
    """True if the gradient of a row's output lies in a plane whatever rows come with it.

    It does for a function of two means over rows, and does not if rows are compared with each other. Outputs of fewer than
    three numbers count as such functions.
    """
    count = experiments.case.num_rows
    found = []
    for start in range(min(5, count - 1)):
        rows = [0, *range(1 + start, count, 5)]
        gradients: list[Tensor] = []
        watch = partial(_watch_first_output, gradients)
        experiments.case.once(take_rows(experiments.case.batch, rows), rows, watch)
        if not gradients:
            return False
        found.append(gradients[-1].double().cpu())
    stacked = torch.stack([row / row.norm().clamp(min=1e-300) for row in found])
    if stacked.shape[1] < 3:
        return True
    values = torch.linalg.svdvals(stacked)
    return len(values) < 3 or float(values[2]) <= 1e-6 * float(values[0])


def _depend_on_parameters(experiments: Experiments, best: BestWeights) -> bool:
    """True if other parameters give other weights, which units, a function of the batch, cannot."""
    other = copy_model(experiments.case.model, experiments.case.copy)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    case = replace(experiments.case, model=other)
    now = best_weights(replace(experiments, case=case, floor=replace(experiments.floor, whole=case.whole())))
    if now is None or not now.is_unique:
        return False
    return any(abs(one - two) > 1e-5 for one, two in zip(best.weights, now.weights, strict=True))


def _watch_first_output(into: list[Tensor], model: nn.Module) -> None:
    """Collect the gradient of the first row of the model's output."""

    def watch(module: nn.Module, inputs: object, output: Batch) -> None:
        tensor = next((one for one in tensors(output) if one.requires_grad and one.dim() > 0), None)
        if tensor is not None:
            tensor.register_hook(lambda grad: into.append(grad[0].detach().flatten()))

    model.register_forward_hook(watch)


def _in_encode(experiments: Experiments, objective: Coupled) -> Cause | None:
    """Compare the representations of the first and last micro-batch with those in the whole batch."""
    text = "Rows look at each other in encode, which is to take each by itself."
    in_model = _in_the_model(experiments, text)
    if in_model is not None:
        return in_model
    case, cut = experiments.case, experiments.cut
    seen: list[list[Tensor]] = []

    def encode(model: nn.Module, batch: Batch) -> Batch:
        found = objective.encode(model, batch)
        seen.append([tensor.detach().double() for tensor in tensors(found)])
        return found

    spied = replace(case, objective=replace(objective, encode=encode))
    parts = [(case.batch, range(case.num_rows)), *((cut[place], cut.row_numbers[place]) for place in (0, -1))]
    for batch, rows in parts:
        spied.once(batch, rows)
    whole, *others = seen
    for (_, rows), part in zip(parts[1:], others, strict=True):
        for full, some in zip(whole, part, strict=True):
            if full.dim() == 0 or len(full) != case.num_rows or not same_rows(experiments, full, some, tuple(rows)):
                return Cause(
                    kind="coupled",
                    explanation=f"{text} What it returns for some rows depends on the others, or is one for all of them: a "
                    "mean, a centre, an order over the rows of a micro-batch.",
                    fix="Let encode(model, batch) return one entry per row that depends on that row alone, and take means over "
                    "rows in loss(representations), which sees all of them.",
                )
    return None


Key = tuple[str, str, int]
"""Name of a module, its class or "input", and the number of the tensor."""


def _in_the_model(experiments: Experiments, text: str) -> Cause | None:
    """Name the first input or output of a module that changes for some rows if others are left out.

    The first and the last micro-batch are compared, because a cumulative sum leaves the first unchanged.
    """
    case = experiments.case
    whole = _SeenRows(case.num_rows)
    case.once(case.batch, range(case.num_rows), whole.watch)
    found: set[Key] = set()
    for place in (0, len(experiments.cut) - 1):
        rows = experiments.cut.row_numbers[place]
        part = _SeenRows(len(rows))
        case.once(experiments.cut[place], rows, part.watch)
        for key, full in whole.tensors.items():
            some = part.tensors.get(key)
            if some is not None and full.shape[1:] == some.shape[1:] and not same_rows(experiments, full, some, rows):
                found.add(key)
    first = next((key for key in whole.tensors if key in found), None)
    return None if first is None else _mixing(text, first, whole.modules[first[0]])


def same_rows(experiments: Experiments, full: Tensor, some: Tensor, rows: tuple[int, ...]) -> bool:
    """True if `some` is these rows of `full`, up to rounding."""
    wanted = full[list(rows)].double()
    if wanted.shape != some.shape:
        return False
    return float((some.double() - wanted).norm()) <= largest_floor(experiments.floor.unit) * float(wanted.norm())


def _mixing(text: str, key: Key, module: nn.Module) -> Cause:
    name, what, _ = key
    name = name or "the model itself"
    if what == "input":
        text += (
            f" They do so before the model: what {name!r} is given for a row depends on the others, because the objective "
            "prepares its inputs from all rows (a mean, a standard deviation, an order)."
        )
        fix = (
            "Prepare the inputs row by row, or in the loader, before the batch is cut; or with statistics that are fixed "
            "before training."
        )
        return Cause(kind="coupled", explanation=text, fix=fix)
    text += f" They do so in the model, first in {name!r} ({what})."
    fix = (
        "Take what looks across rows out of the model into the loss of Coupled(encode, loss), or use a layer that looks at "
        "one row at a time."
    )
    if getattr(module, "batch_first", True) is False:
        text += " It takes time first (batch_first=False), and reads the rows as time."
        fix = f"Make it {what}(..., batch_first=True); or give the batch time first, with micro_batch=Rows(n, batch_dim=1)."
    return Cause(kind="coupled", explanation=text, fix=fix)


class _SeenRows:
    """Inputs and outputs of modules, rows first, in order of creation."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.tensors: dict[Key, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self.modules[name] = module
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(partial(self._after, name))

    def _before(self, name: str, module: nn.Module, inputs: Any, named: Any) -> None:
        if not any(key[1] != "input" for key in self.tensors):  # made by the objective, not by a layer
            self._keep(name, "input", [*inputs, *named.values()])

    def _after(self, name: str, module: nn.Module, inputs: Any, output: Batch) -> None:
        self._keep(name, type(module).__name__, output)

    def _keep(self, name: str, what: str, values: Batch) -> None:
        for tensor in tensors(values):
            if tensor.dim() > 0 and tensor.shape[0] == self._num_rows and tensor.is_floating_point():
                number = sum(key[:2] == (name, what) for key in self.tensors)
                self.tensors[name, what, number] = tensor.detach().clone()


LARGEST_GROUP = 8


def find_split_groups(experiments: Experiments) -> Cause | None:
    """Cut so that neighbours, or the same row of each block, stay together, and see whether the error disappears."""
    for text, code, cuts in _kept_together(experiments):
        if all(experiments.try_out(experiments.case, cut).is_exact for cut in cuts):
            return Cause(
                kind="groups",
                explanation=f"{text} belong together, and a micro-batch that tears them apart is not exact; cut so that they "
                "stay together, it is.",
                fix=f"Say so: micro_batch=Rows(n, groups={code}), which never tears them apart.",
            )
    return None


def _kept_together(experiments: Experiments) -> Iterator[tuple[str, str, list[MicroBatches]]]:
    """Yield a description, the code of `groups=`, and two cuts each: what is exact in one by chance is not in the other."""
    count, batch = experiments.case.num_rows, experiments.case.batch
    sizes = [size for size in range(2, LARGEST_GROUP + 1) if count % size == 0 and count // size >= 3]
    for size in sizes:
        yield f"{size} neighbouring rows each", str(size), [uneven_cut(batch, size), Rows(size).cut(batch)]
    for size in sizes[:2]:
        block = count // size
        cuts = []
        for parts in ([[0], range(1, block)], [[row] for row in range(block)]):
            rows = [sorted(row + part * block for row in rows for part in range(size)) for rows in parts]
            cuts.append(cut_by_rows(batch, rows))
        yield f"Row k of each of {size} blocks", f"anybatch.Stacked({size})", cuts


def find_trimming(experiments: Experiments) -> Cause | None:
    """Keep the padding, and see whether the error disappears; then find the tensor."""
    cut, case = experiments.cut, experiments.case
    trimmed = _trimmed(experiments)
    untrimmed = MicroBatches([take_rows(case.batch, list(rows)) for rows in cut.row_numbers], cut.cut)
    if not trimmed or not experiments.try_out(case, untrimmed).is_exact:
        return None
    if isinstance(case.objective, Coupled):
        return Cause(
            kind="padding",
            explanation="Padding is cut off each micro-batch (Tokens), so that the representations of a coupled loss have "
            "other lengths in each, or change with it; they are exact when the same rows keep it.",
            fix="Let encode return one vector per row that does not look at padding; or cut by rows, Rows(n), which leaves "
            "padding in.",
        )
    for name in trimmed if isinstance(case.batch, Mapping) else ():
        has_floats = case.batch[name].is_floating_point()
        if has_floats and experiments.try_out(case, _with_whole(experiments, name)).is_exact:
            return Cause(
                kind="padding",
                explanation=f"Padding is cut off {name!r} with the tokens, and it has no entry per token: with all of it "
                "the gradient is exact.",
                fix=f"Say that it stays as it is: Tokens(budget, keep=[{name!r}]).",
            )
    return Cause(
        kind="padding",
        explanation="The gradient changes when padding is cut off, and is exact when the same rows keep it: the model "
        "or the loss looks at padding. That is a fact about the model, not about its rows.",
        fix="Mask padding in the model and ignore it in the loss; or cut by rows, Rows(n), which leaves padding in.",
    )


def _trimmed(experiments: Experiments) -> list[str]:
    """Name the fields of a batch that are shorter in its micro-batches; [""] for a batch without names."""
    cut, batch = experiments.cut, experiments.case.batch
    if cut.cut is None:
        return []
    if not isinstance(batch, Mapping):
        return [""]
    parts: list[Any] = list(cut)
    return [
        str(name)
        for name, value in batch.items()
        if hasattr(value, "shape") and any(part[name].shape[1:] != value.shape[1:] for part in parts)
    ]


def _with_whole(experiments: Experiments, name: str) -> MicroBatches:
    cut, batch = experiments.cut, experiments.case.batch
    pairs: Any = zip(cut, cut.row_numbers, strict=True)
    return MicroBatches([dict(part) | {name: take_rows(batch, list(rows))[name]} for part, rows in pairs], cut.cut)
