"""Several ways through one batch, compared with the big batch at once: gradient error, live memory, time."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from time import process_time

import torch
from torch import Tensor, nn

from benchmarks.meter import Timing, interleave
from benchmarks.results import is_quick, write_results

BIG_BATCH = "big batch at once"
"""The way that all others are compared with."""
Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way through the batch."""

    error: float
    """Of the gradient, relative to the big batch at once; both in float64."""
    peak_bytes: int
    memory: float
    """Peak live tensors as a ratio to the big batch's."""
    time: Timing
    """By the clock on the wall."""
    processor_time: Timing
    """Of all threads, without waiting."""


@dataclass(frozen=True, slots=True)
class Walked:
    """Every way walked once: its gradient in float64 and its peak; and the step that is still to be timed."""

    steps: Mapping[str, Step]
    gradients: Mapping[str, Tensor]
    peaks: Mapping[str, int]

    def error(self, name: str) -> float:
        """Of the gradient, relative to the big batch at once."""
        wanted = self.gradients[BIG_BATCH]
        return float((self.gradients[name] - wanted).norm() / wanted.norm())

    def memory(self, name: str) -> float:
        """Peak live tensors as a ratio to the big batch's."""
        return round(self.peaks[name] / self.peaks[BIG_BATCH], 4)


def compare_ways(walked: Walked, *, rounds: int) -> dict[str, Measured]:
    """Time the steps in turn, and put beside it what is known of their gradients and peaks."""
    times = interleave(walked.steps, rounds=rounds, repeats=1)
    processor_times = interleave(walked.steps, rounds=rounds, repeats=1, clock=process_time)
    return {
        name: Measured(
            error=walked.error(name),
            peak_bytes=walked.peaks[name],
            memory=walked.memory(name),
            time=times[name],
            processor_time=processor_times[name],
        )
        for name in walked.steps
    }


def afresh(model: nn.Module, step: Step) -> Step:
    """The step, from no gradients."""

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        step()

    return run


def gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector."""
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def run_and_write(
    measure: Callable[[int], dict[str, Measured]],
    *,
    title: str,
    rounds: tuple[int, int],
    results: str,
    description: str | None,
    notes: Mapping[str, str] = {},
) -> None:
    """The command line of such a benchmark: measure (quick, full `rounds`), print a table, write the JSON."""
    quick = is_quick(description, f"{rounds[0]} rounds instead of {rounds[1]}: noisier")
    torch.set_num_threads(1)
    measured = measure(rounds[0] if quick else rounds[1])
    print(f"{title:38}  error    memory    time  processor")
    for name, one in measured.items():
        low, high = one.time.spread
        print(
            f"{name:38}  {one.error:7.1e}  {one.memory:6.3f}  {one.time.ratio:6.3f}  {one.processor_time.ratio:9.3f}"
            f"   quartiles {low:.3f} to {high:.3f}"
            f"   {one.peak_bytes / 2**20:8.1f} MiB  {one.time.seconds:6.3f} s"
        )
    for name, note in notes.items():
        print(f"{name:38}  {note}")
    write_results(results, {"measured": {name: asdict(one) for name, one in measured.items()} | dict(notes)})
