"""Rows that look at each other, and forwards that decide for all rows at once."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from anybatch.batches import Batch, tensors
from anybatch.proof.causes.counting_units import best_weights
from anybatch.proof.causes.experiments import Experiments
from anybatch.proof.floor import largest_floor
from anybatch.proof.verdict import Cause


def find_uneven_touch(experiments: Experiments) -> Cause | None:
    """Which parameters get a gradient from the whole batch, and which from each micro-batch?"""
    whole = experiments.floor.whole.parameters
    each = experiments.each_alone()
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


def find_coupling(experiments: Experiments) -> Cause | None:
    """Is the whole batch's gradient any weighted sum of the micro-batches' at all? If not, their rows look at each other."""
    numel = sum(grad.numel() for grad in experiments.floor.whole.parameters.values() if grad is not None)
    if experiments.objective is None or numel <= 2 * len(experiments.cut):
        return None  # said to be coupled already; or too few numbers, to which some weights always fit
    _, residual = best_weights(experiments)
    if not math.isfinite(residual) or residual <= largest_floor(experiments.floor.unit):
        return None
    layer = _first_layer_that_mixes(experiments)
    where = (
        f" They do so in the model, first in {layer}."
        if layer
        else " The model's outputs do not, so it is the loss that does."
    )
    in_loss = (
        "Give the loss as Coupled(encode, loss): encode(model, batch) returns the representations of the rows, "
        "loss(representations) one number for all of them. info_nce() and clip_loss() are there."
    )
    in_model = (
        "Take what looks across rows out of the model into the loss of Coupled(encode, loss), or use a layer that looks at "
        "one row at a time."
    )
    return Cause(
        kind="coupled",
        explanation="Rows look at each other: no weighting of the micro-batches' gradients gives the whole batch's "
        f"(the best leaves {residual:.2g} of it).{where}",
        fix=in_model if layer else in_loss,
    )


def unknown_weights(experiments: Experiments) -> str:
    """What weights would be right, where rows do not look at each other and no count was found that gives them."""
    if experiments.objective is None:
        return ""
    weights, residual = best_weights(experiments)
    if not residual <= largest_floor(experiments.floor.unit):
        return ""
    sizes = ", ".join(str(len(rows)) for rows in experiments.cut.row_numbers)
    return f" Micro-batches of {sizes} rows should weigh {', '.join(f'{weight:.4f}' for weight in weights)}."


def _first_layer_that_mixes(experiments: Experiments) -> str | None:
    """The first module, in the order they run, whose output for some rows depends on which other rows are there."""
    case, rows = experiments.case, experiments.cut.row_numbers[0]
    whole, part = _Outputs(case.num_rows), _Outputs(len(rows))
    case.once(case.batch, range(case.num_rows), whole.watch)
    case.once(experiments.cut[0], rows, part.watch)
    for key, full in whole.seen.items():
        some = part.seen.get(key)
        if some is not None and full.shape[1:] == some.shape[1:]:
            wanted = full[list(rows)].double()
            if float((some.double() - wanted).norm()) > largest_floor(experiments.floor.unit) * float(wanted.norm()):
                name, kind, _ = key
                return f"{name or 'the model itself'!r} ({kind})"
    return None


class _Outputs:
    """What modules returned, rows first, by (name, kind, number of the output), in the order they finished."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.seen: dict[tuple[str, str, int], Tensor] = {}

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, Sequence[Batch], Batch], None]:
        def hook(module: nn.Module, inputs: Sequence[Batch], output: Batch) -> None:
            for tensor in tensors(output):
                if tensor.dim() > 0 and tensor.shape[0] == self._num_rows and tensor.is_floating_point():
                    number = sum(key[0] == name for key in self.seen)
                    self.seen[name, type(module).__name__, number] = tensor.detach().clone()

        return hook
