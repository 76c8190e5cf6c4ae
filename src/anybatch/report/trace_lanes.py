"""The stages of a traced update as a picture: a lane for each micro-batch, and one for what happens once."""

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.records import MicroBatchSeen, TracedStage, read
from anybatch.report.writing import written_value

ONCE = ("clip", "step", "zero")
"""What a batch goes through as a whole, always; where its rows wait for each other, the passes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One micro-batch, or the whole batch, from left to right."""

    title: str
    cells: tuple[tuple[str, str], ...]
    """(stage, what came out of it)."""


def lanes_of(stages: Sequence[TracedStage]) -> tuple[Lane, ...]:
    """A lane for each micro-batch in order, then the batch's own."""
    numbers = sorted(
        {entry.micro_batch for entry in stages if entry.micro_batch is not None and entry.stage not in ONCE}
    )
    lanes = [
        Lane(title=f"micro-batch {number}", cells=_cells([entry for entry in stages if entry.micro_batch == number]))
        for number in numbers
    ]
    once = [entry for entry in stages if entry.stage in ONCE or (entry.micro_batch is None and entry.stage != "load")]
    if once:
        lanes.append(Lane(title="the whole batch, once", cells=_cells(once)))
    return tuple(lanes)


def made_of(stages: Sequence[TracedStage]) -> tuple[MicroBatchSeen, ...]:
    """Rows, units and share of each micro-batch that had a loss of its own."""
    rows = {entry.micro_batch: entry.facts.get("rows") for entry in stages if entry.stage == "load"}
    parts = (
        read(MicroBatchSeen, {**entry.facts, "rows": rows.get(entry.micro_batch)})
        for entry in stages
        if entry.stage == "loss" and entry.micro_batch is not None
    )
    return tuple(part for part in parts if part is not None)


def _cells(entries: Sequence[TracedStage]) -> tuple[tuple[str, str], ...]:
    """One cell a stage; of two entries of a stage (weights before, weights after) the last speaks."""
    told = {entry.stage: _outcome(entry) for entry in entries if entry.stage != "step" or "before" not in entry.title}
    place = {stage: number for number, stage in enumerate(_SPEAKS)}
    return tuple(sorted(told.items(), key=lambda cell: place.get(cell[0], len(place))))


_SPEAKS = {
    "load": ("shapes", "rows"),
    "forward": ("output",),
    "loss": ("loss", "share"),
    "backward": ("its norm",),
    "accumulate": ("gradient norm so far", "gradient norm"),
    "clip": ("norm before", "norm after"),
    "step": ("change of all weights (norm)",),
    "zero": (".grad", "gradients left"),
}


_BEFORE = {"backward": "norm ", "accumulate": "norm of the sum ", "step": "weights moved by ", "zero": ".grad "}


def _outcome(entry: TracedStage) -> str:
    """The facts that matter of a stage, in few words; clipping shows what it made of what."""
    found = [written_value(name, entry.facts[name]) for name in _SPEAKS.get(entry.stage, ()) if name in entry.facts]
    if entry.stage == "loss" and len(found) == 2:
        return f"{found[0]}, share {found[1]}"
    if entry.stage == "clip" and len(found) == 2:
        return f"norm {found[0]} → {found[1]}"
    return f"{_BEFORE.get(entry.stage, '')}{found[0]}" if found and found[0] else entry.title
