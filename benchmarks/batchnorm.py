"""What exact BatchNorm costs: time and live tensor memory against the big batch at once, beside the ways that are taken today.

    python -m benchmarks.batchnorm [--quick]

A residual net with 20 BatchNorms on 128 x 3 x 32 x 32, in micro-batches of 32. Times are ratios to the big batch, interleaved
in one process, one thread. Memory is the peak of live tensors of every thread, parameters, gradients and batch included. The
error is that of the gradient in float64: in fp32 a rounding may turn a ReLU on or off, in the big batch as in any other way.
"""

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Accumulator, supervised
from benchmarks.meter import peak_bytes_of_all_threads
from benchmarks.models import ResidualNet
from benchmarks.ways import Measured, Step, Walked, afresh, compare_ways, gradient, run_and_write

NUM_MICRO_BATCHES = 4


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


def walk(rows: int = 128) -> Walked:
    """Error and memory of every way."""
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
    return Walked(steps, gradients, peaks)


def measure(rounds: int) -> dict[str, Measured]:
    """Error, memory and time of every way."""
    return compare_ways(walk(), rounds=rounds)


def main() -> None:
    run_and_write(
        measure,
        title="128 x 3 x 32 x 32, micro-batches of 32",
        rounds=(4, 12),
        results="batchnorm",
        description=__doc__,
    )


if __name__ == "__main__":
    main()
