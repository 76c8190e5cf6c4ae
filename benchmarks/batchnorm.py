"""What exact BatchNorm costs: time and live tensor memory against the big batch at once, beside the ways that are taken today.

    python -m benchmarks.batchnorm [--quick]

A residual net with 20 BatchNorms on 128 x 3 x 32 x 32, in micro-batches of 32. Times are ratios to the big batch, interleaved
in one process, one thread. Memory is the peak of live tensors of every thread, parameters, gradients and batch included. The
error is that of the gradient in float64: in fp32 a rounding may turn a ReLU on or off, in the big batch as in any other way.
"""

import argparse
import copy
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import process_time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Accumulator, supervised
from benchmarks.meter import Timing, interleave, peak_bytes_of_all_threads
from benchmarks.models import ResidualNet

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "batchnorm.json"
NUM_MICRO_BATCHES = 4
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


def images(rows: int = 128) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))


def big_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    return lambda: F.cross_entropy(model(batch[0]), batch[1]).backward()


def checkpointed(model: ResidualNet, batch: tuple[Tensor, Tensor]) -> Step:
    """The big batch with every block run again in backward, its running statistics put back as they were."""

    def step() -> None:
        x = model.stem(batch[0])
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        F.cross_entropy(model.head(x), batch[1]).backward()

    return step


def accumulated(model: nn.Module, batch: tuple[Tensor, Tensor], **options: str | None) -> Step:
    micro_batch = len(batch[0]) // NUM_MICRO_BATCHES
    accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch, **options)
    return lambda: accumulator.backward(batch) and None


WAYS: Mapping[str, Callable[[ResidualNet, tuple[Tensor, Tensor]], Step]] = {
    "big batch at once": big_batch,
    "plain accumulation (micro)": lambda model, batch: accumulated(model, batch, batch_norm="micro"),
    "big batch, checkpointed by block": checkpointed,
    "exact, nothing offloaded": lambda model, batch: accumulated(model, batch, batch_norm="exact", offload=None),
    "exact, offload to disk": lambda model, batch: accumulated(model, batch, batch_norm="exact", offload="disk"),
}


def measure(rounds: int, rows: int = 128) -> dict[str, Measured]:
    """Error, memory and time of every way."""
    batch = images(rows)
    precise = batch[0].double(), batch[1]
    torch.manual_seed(1)
    model = ResidualNet()
    steps: dict[str, Step] = {}
    gradients, peaks = {}, {}
    for name, way in WAYS.items():
        twin = copy.deepcopy(model).double()
        way(twin, precise)()
        gradients[name] = gradient(twin)
        own = copy.deepcopy(model)
        step = way(own, batch)
        peaks[name] = peak_bytes_of_all_threads(step, [*own.parameters(), *own.buffers(), *batch])
        steps[name] = afresh(own, step)
    times = interleave(steps, rounds=rounds, repeats=1)
    processor_times = interleave(steps, rounds=rounds, repeats=1, clock=process_time)
    whole, wanted = peaks["big batch at once"], gradients["big batch at once"]
    return {
        name: Measured(
            error=float((gradients[name] - wanted).norm() / wanted.norm()),
            peak_bytes=peaks[name],
            memory=round(peaks[name] / whole, 4),
            time=times[name],
            processor_time=processor_times[name],
        )
        for name in WAYS
    }


def afresh(model: nn.Module, step: Step) -> Step:
    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        step()

    return run


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 rounds instead of 12: noisier")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(rounds=4 if options.quick else 12)
    print(f"{'128 x 3 x 32 x 32, micro-batches of 32':38}  error    memory    time  processor")
    for name, one in measured.items():
        low, high = one.time.spread
        on_processor = one.processor_time.ratio
        print(
            f"{name:38}  {one.error:7.1e}  {one.memory:6.3f}  {one.time.ratio:6.3f}  {on_processor:9.3f}"
            f"   quartiles {low:.3f} to {high:.3f}"
            f"   {one.peak_bytes / 2**20:8.1f} MiB  {one.time.seconds:6.3f} s"
        )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    results = {name: asdict(one) for name, one in measured.items()}
    RESULTS.write_text(
        json.dumps({"date": date.today().isoformat(), "versions": versions, "measured": results}, indent=1) + "\n"
    )
    print(f"\nwritten to docs/benchmarks/{RESULTS.name}")


if __name__ == "__main__":
    main()
