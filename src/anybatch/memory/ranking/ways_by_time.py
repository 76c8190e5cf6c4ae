"""Ways to run a batch inside a memory, by predicted time: smaller micro-batches, checkpointing, saved tensors on the host."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from anybatch.batches import Tokens, best_cut
from anybatch.errors import PlanError, first_line
from anybatch.memory.predicting import (
    LargestFitting,
    MicroBatchSource,
    PassShape,
    RankedWay,
    Trials,
    find_largest_fitting,
    recomputing_of,
)
from anybatch.memory.ranking.pass_times import RealPasses, Switch
from anybatch.memory.tracing import ELSEWHERE, Moments, highest, is_real

ROUNDS = 3
MOST_SECONDS = 2.0
"""All ways are measured in turn, `ROUNDS` times, or twice where that takes so long."""
LONG_SECONDS = 5.0
"""A pass that would take longer than this is not measured: a smaller one stands for it."""
CLEARLY = 0.95
"""A smaller micro-batch is named instead of the largest where it takes less than this share of the time."""
RECOMPUTED = 4 / 3
"""The work of a pass whose forward runs twice, where backward is two forwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The ways that fit, the fastest first."""

    ways: tuple[RankedWay, ...] = ()
    left_out: tuple[str, ...] = ()
    """Which way was not offered, or that none was measured, and why."""


@dataclass(frozen=True, slots=True)
class _Way:
    kind: Literal["smaller", "checkpointing", "offload"]
    name: str
    found: LargestFitting
    switch: Switch
    work: float = 1.0


@dataclass(frozen=True, slots=True)
class _Line:
    """Seconds of a pass by its size."""

    fixed: float
    each: float

    def of(self, sizes: Sequence[float]) -> float:
        return sum(self.fixed + self.each * size for size in sizes)


def rank_ways(
    trials: Trials, found: LargestFitting, moments: Moments, limit: int, *, tokens: Tokens | None, why_not: str
) -> Ranking:
    """Every way that fits into `limit` bytes, by the time of an update's passes.

    `moments` are those of plain passes at the size found, `why_not` says why none can be measured.
    """
    if found.is_whole:
        return Ranking()
    if trials.is_together:
        return Ranking(left_out=("Ways are not ranked where rows look at each other.",))
    if highest(replace(moment, activations=0) for moment in moments).total > limit:
        return Ranking(left_out=("No way that saves activations makes it fit: the rest is more than the memory.",))
    ways, left_out = _ways(trials, found, limit)
    lines: dict[str, _Line] = {}
    if ways and not why_not:
        ways, unlike = _alike(trials, ways)
        left_out += unlike
        try:
            lines = _measured(trials, ways)
        except Exception as error:  # what cannot run is no reason not to plan it
            why_not = _why(error)
    if ways and why_not:
        left_out.append(f"No pass was measured, so ways are in the order of the work that they do: {why_not}.")
    rows = [_row(trials.source, tokens, way, lines.get(way.name), limit) for way in ways]
    return Ranking(
        ways=tuple(sorted(rows, key=lambda row: (row.seconds or row.work, row.passes))), left_out=tuple(left_out)
    )


def why_unmeasured(trials: Trials, *, is_wrapped: bool) -> str:
    """Why passes of this model cannot be measured here; nothing where they can be."""
    setup = trials.setup
    if not is_real(setup.parts, trials.source.batch):
        return "the model, or the batch, holds no numbers"
    if is_wrapped:
        return "the model is compiled, or shared by ranks"
    return "" if setup.is_in_place else f"the model does not lie on {setup.device}, or has hooks on its parameters"


def _ways(trials: Trials, found: LargestFitting, limit: int) -> tuple[list[_Way], list[str]]:
    ways = [_Way("smaller", "smaller micro-batches", found, nullcontext)] if found.size else []
    left_out = []
    offers = {"Checkpointing": _recomputed, "Keeping saved tensors on the host": _on_the_host}
    if trials.setup.device.type == "cpu" or not trials.is_fake:
        del offers["Keeping saved tensors on the host"]  # they are there, or there is no telling what it saves
    for name, offer in offers.items():
        try:
            way = offer(trials, limit)
        except Exception as error:
            left_out.append(f"{name} is not offered: {_why(error)}.")
            continue
        if way.found.size > found.size:
            ways.append(way)
        else:
            left_out.append(f"{name} lets no larger micro-batch in.")
    return ways, left_out


def _recomputed(trials: Trials, limit: int) -> _Way:
    tried, real = recomputing_of(trials.probe.parts[0]), recomputing_of(trials.setup.parts[0])
    with tried.on():
        found = find_largest_fitting(trials.anew(), limit)
    return _Way("checkpointing", f"checkpointing {real.blocks}", found, real.on, RECOMPUTED)


def _on_the_host(trials: Trials, limit: int) -> _Way:
    with saved_tensors_hooks(lambda tensor: tensor.to(ELSEWHERE), lambda packed: packed.to("cpu")):
        found = find_largest_fitting(trials.anew(), limit)
    return _Way("offload", "saved tensors on the host", found, save_on_cpu)


def _alike(trials: Trials, ways: list[_Way]) -> tuple[list[_Way], list[str]]:
    """The ways that leave the gradient of plain passes, and why others do not."""
    passes, alike, unlike = _passes(trials), [], []
    plain = next((way for way in ways if way.kind == "smaller"), None)
    for way in ways:
        try:
            if way is not plain:
                small = trials.source.micro_batch(_shapes(trials, (plain or way).found)[0])
                passes.check_same(way.switch, [small, small], is_plain_possible=plain is not None)
            alike.append(way)
        except Exception as error:
            unlike.append(f"{way.name[0].upper()}{way.name[1:]} is not offered: {_why(error)}.")
    return alike, unlike


def _measured(trials: Trials, ways: list[_Way]) -> dict[str, _Line]:
    """For each way a line through two sizes, each the best of several rounds in turn."""
    passes, source = _passes(trials), trials.source
    best: dict[tuple[str, PassShape], float] = {}
    started = perf_counter()
    for number in range(ROUNDS):
        for way in ways:
            small, large = _shapes(trials, way.found)
            for shape in (small, large):
                factor = _size(source, large) / _size(source, small)
                if shape is large and best[way.name, small] * factor > LONG_SECONDS:
                    continue
                took = passes.seconds(way.switch, source.micro_batch(shape))
                best[way.name, shape] = min(took, best.get((way.name, shape), took))
        if number and perf_counter() - started > MOST_SECONDS:
            break
    return {way.name: _line(source, _shapes(trials, way.found), way.name, best) for way in ways}


def _line(
    source: MicroBatchSource, shapes: tuple[PassShape, PassShape], name: str, best: dict[tuple[str, PassShape], float]
) -> _Line:
    small, large = shapes
    few, many = _size(source, small), _size(source, large)
    first, last = best[name, small], best.get((name, large))
    if last is None or few == many:
        return _Line(0.0, first / few)
    each = max((last - first) / (many - few), 0.0)
    return _Line(last - each * many, each)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, PlanError) else first_line(error)


def _passes(trials: Trials) -> RealPasses:
    return RealPasses(trials.setup.parts, trials.setup.running, trials.setup.device)


def _shapes(trials: Trials, found: LargestFitting) -> tuple[PassShape, PassShape]:
    """A quarter of the micro-batch that fits, and all of it as it is cut."""
    rows, length = found.shape
    if length is None:
        rows = -(-trials.source.num_rows // -(-trials.source.num_rows // rows))
    return (max(rows // 4, trials.smallest), length), (rows, length)


def _size(source: MicroBatchSource, shape: PassShape) -> int:
    rows, length = shape
    return rows * (length or source.row_length or 1)


def _row(source: MicroBatchSource, tokens: Tokens | None, way: _Way, line: _Line | None, limit: int) -> RankedWay:
    """The way at its largest size, or at a quarter of it where that fits too and is clearly faster."""

    def at(size: int) -> RankedWay:
        sizes = _sizes(source, tokens, size)
        is_largest = size == way.found.size
        return RankedWay(
            kind=way.kind,
            way=way.name,
            micro_batch=size,
            passes=len(sizes),
            peak=way.found.peak if is_largest else way.found.peaks.peak(size),
            seconds=None if line is None else line.of(sizes),
            work=way.work,
        )

    largest = at(way.found.size)
    smaller = at(max(way.found.size // 4, source.row_length or 1))
    is_faster = line is not None and (smaller.seconds or 0.0) < CLEARLY * (largest.seconds or 0.0)
    return smaller if is_faster and smaller.peak <= limit else largest


def _sizes(source: MicroBatchSource, tokens: Tokens | None, size: int) -> list[float]:
    """What a batch is cut to, in rows or in tokens with padding."""
    if tokens is None or source.row_length is None:
        num_passes = -(-source.num_rows // size)
        return [source.num_rows / num_passes] * num_passes
    lengths = [source.row_length] * source.num_rows if source.lengths is None else source.lengths.lengths
    cut = best_cut(lengths, size, tokens.cost)
    return [len(rows) * length for rows, length in zip(cut.rows, cut.lengths, strict=True)]
