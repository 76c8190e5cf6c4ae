"""Rows that belong together and are torn apart, and padding that is cut off where something looks at it."""

from collections.abc import Iterator, Mapping
from typing import Any

from anybatch.core import Coupled, MicroBatches, Rows, take_rows
from anybatch.verification.causes.experiments import Experiments
from anybatch.verification.cuts import cut_by_rows, uneven_cut, untrimmed_cut
from anybatch.verification.verdict import Cause

LARGEST_GROUP = 8


def find_torn_groups(experiments: Experiments) -> Cause | None:
    """Cut as unevenly, but keep neighbours together, or the same row of each block, and see whether the error goes."""
    for told, code, cuts in _kept_together(experiments):
        if all(experiments.try_out(experiments.case, cut).is_exact for cut in cuts):
            return Cause(
                kind="groups",
                explanation=f"{told} belong together, and a micro-batch that tears them apart is not exact; cut so that they "
                "stay together, it is.",
                fix=f"Say so: micro_batch=Rows(n, groups={code}), which never tears them apart.",
            )
    return None


def _kept_together(experiments: Experiments) -> Iterator[tuple[str, str, list[MicroBatches]]]:
    """Every group by itself, and a few together: what is exact in one by chance is not in the other."""
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
    """Leave the padding in, and see whether the error goes; then which tensor it was."""
    cut, case = experiments.cut, experiments.case
    trimmed = _trimmed(experiments)
    if not trimmed or not experiments.try_out(case, untrimmed_cut(case.batch, cut)).is_exact:
        return None
    if isinstance(case.objective, Coupled):
        return Cause(
            kind="padding",
            explanation="Padding is cut off each micro-batch (Tokens), so that the representations of a coupled loss have "
            "other lengths in each, or change with it; they are exact when the same rows keep it.",
            fix="Let encode return one vector per row that does not look at padding; or cut by rows, Rows(n), which leaves "
            "padding in.",
        )
    if isinstance(case.batch, Mapping):
        for name in trimmed:
            if (
                case.batch[name].is_floating_point()
                and experiments.try_out(case, _with_whole(experiments, name)).is_exact
            ):
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
    """The fields of a batch that are shorter in its micro-batches; of a batch without names, whether any is."""
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
    parts: list[Any] = []
    for part, rows in zip(cut, cut.row_numbers, strict=True):
        assert isinstance(part, Mapping)
        parts.append(dict(part) | {name: take_rows(batch, list(rows))[name]})
    return MicroBatches(parts, cut.cut)
