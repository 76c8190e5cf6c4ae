"""What a contrastive loss over the whole batch costs when the batch is cut, beside the ways that are taken today.

    python -m benchmarks.coupled [--quick]

InfoNCE over 256 pairs of 16 tokens, a transformer of four layers with dropout as encoder, in 4 micro-batches of 64. Times are
ratios to the big batch, interleaved in one process, one thread. Memory is the peak of live tensors, parameters, gradients and
batch included. The error is that of the gradient without dropout, in float64. sentence-transformers' cached loss takes part if
the package is installed.
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
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, info_nce
from benchmarks.meter import Timing, interleave, peak_bytes_of_all_threads
from benchmarks.models import SentenceEncoder

try:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
except ImportError:
    CachedMultipleNegativesRankingLoss = None

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "coupled.json"
PAIRS, NUM_MICRO_BATCHES, TEMPERATURE = 256, 4, 0.05
GRADCACHE_PUBLISHED = "around 20 % more time (Gao et al. 2021, as sentence-transformers' documentation cites it)"
Step = Callable[[], None]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One way through the batch."""

    error: float
    """Of the gradient without dropout, relative to the big batch at once; both in float64."""
    peak_bytes: int
    memory: float
    """Peak live tensors as a ratio to the big batch's."""
    time: Timing
    """By the clock on the wall."""
    processor_time: Timing
    """Of all threads, without waiting."""


def pairs(rows: int = PAIRS, length: int = 16) -> Pair:
    torch.manual_seed(0)
    return torch.randint(0, 256, (rows, length)), torch.randint(0, 256, (rows, length))


def encode(model: nn.Module, pair: Pair) -> Pair:
    return model(pair[0]), model(pair[1])


def big_batch(model: nn.Module, pair: Pair) -> Step:
    loss = info_nce(TEMPERATURE)
    return lambda: loss(encode(model, pair)).backward()


def plain(model: nn.Module, pair: Pair) -> Step:
    """The loss of each micro-batch by itself: other negatives, another gradient."""
    objective = Coupled(encode, info_nce(TEMPERATURE)).whole()
    accumulator = Accumulator(model, objective, micro_batch=len(pair[0]) // NUM_MICRO_BATCHES)
    return lambda: accumulator.backward(pair) and None


def coupled(model: nn.Module, pair: Pair) -> Step:
    objective = Coupled(encode, info_nce(TEMPERATURE))
    accumulator = Accumulator(model, objective, micro_batch=len(pair[0]) // NUM_MICRO_BATCHES)
    return lambda: accumulator.backward(pair) and None


def checkpointed(model: SentenceEncoder, pair: Pair) -> Step:
    """The big batch with every layer run again in backward."""
    loss = info_nce(TEMPERATURE)
    return lambda: loss((model(pair[0], is_checkpointed=True), model(pair[1], is_checkpointed=True))).backward()


class _Features(nn.Sequential):
    """The encoder as sentence-transformers' losses call it."""

    def forward(self, features: Mapping[str, Tensor], **_: Any) -> dict[str, Tensor]:
        return {"sentence_embedding": self[0](features["input_ids"])}


def cached_by_sentence_transformers(model: nn.Module, pair: Pair) -> Step:
    assert CachedMultipleNegativesRankingLoss is not None
    size = len(pair[0]) // NUM_MICRO_BATCHES
    loss = CachedMultipleNegativesRankingLoss(_Features(model), scale=1 / TEMPERATURE, mini_batch_size=size)

    def step() -> None:
        features = [{"input_ids": column, "attention_mask": torch.ones_like(column)} for column in pair]
        loss(features, None).backward()

    return step


def ways() -> dict[str, Callable[[SentenceEncoder, Pair], Step]]:
    known: dict[str, Callable[[SentenceEncoder, Pair], Step]] = {
        "big batch at once": big_batch,
        "plain accumulation": plain,
        "big batch, checkpointed by layer": checkpointed,
        "anybatch Coupled": coupled,
    }
    if CachedMultipleNegativesRankingLoss is not None:
        known["sentence-transformers' cached loss"] = cached_by_sentence_transformers
    return known


def measure(rounds: int, rows: int = PAIRS) -> dict[str, Measured]:
    """Error, memory and time of every way."""
    pair = pairs(rows)
    torch.manual_seed(1)
    model = SentenceEncoder()
    steps: dict[str, Step] = {}
    gradients, peaks = {}, {}
    for name, way in ways().items():
        twin = copy.deepcopy(model).double().eval()
        way(twin, pair)()
        gradients[name] = gradient(twin)
        own = copy.deepcopy(model)
        step = way(own, pair)
        peaks[name] = peak_bytes_of_all_threads(step, [*own.parameters(), *pair])
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
        for name in steps
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
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 6: noisier")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(rounds=3 if options.quick else 6)
    print(f"{'InfoNCE, 256 pairs in 4 micro-batches':38}  error    memory    time  processor")
    for name, one in measured.items():
        low, high = one.time.spread
        on_processor = one.processor_time.ratio
        print(
            f"{name:38}  {one.error:7.1e}  {one.memory:6.3f}  {one.time.ratio:6.3f}  {on_processor:9.3f}"
            f"   quartiles {low:.3f} to {high:.3f}"
            f"   {one.peak_bytes / 2**20:8.1f} MiB  {one.time.seconds:6.3f} s"
        )
    print(f"{'GradCache, published':38}  {GRADCACHE_PUBLISHED}")
    if CachedMultipleNegativesRankingLoss is None:
        print("sentence-transformers is not installed: its cached loss was left out")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {name: asdict(one) for name, one in measured.items()}
    results["GradCache, published"] = GRADCACHE_PUBLISHED
    RESULTS.write_text(
        json.dumps({"date": date.today().isoformat(), "versions": versions, "measured": results}, indent=1) + "\n"
    )
    print(f"\nwritten to docs/benchmarks/{RESULTS.name}")


if __name__ == "__main__":
    main()
