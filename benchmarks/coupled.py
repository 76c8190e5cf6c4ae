"""What a contrastive loss over the whole batch costs when the batch is cut, beside the ways that are taken today.

    python -m benchmarks.coupled [--quick]

InfoNCE over 256 pairs of 16 tokens, a transformer of four layers with dropout as encoder, in 4 micro-batches of 64. Times are
ratios to the big batch, interleaved in one process, one thread. Memory is the peak of live tensors, parameters, gradients and
batch included. The error is that of the gradient without dropout, in float64. sentence-transformers' cached loss takes part if
the package is installed.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Accumulator, Coupled, info_nce
from benchmarks.meter import peak_bytes_of_all_threads
from benchmarks.models import SentenceEncoder
from benchmarks.ways import Measured, Step, Walked, afresh, compare_ways, gradient, run_and_write

try:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
except ImportError:
    CachedMultipleNegativesRankingLoss = None

PAIRS, NUM_MICRO_BATCHES, TEMPERATURE = 256, 4, 0.05
GRADCACHE_PUBLISHED = "around 20 % more time (Gao et al. 2021, as sentence-transformers' documentation cites it)"
Pair = tuple[Tensor, Tensor]


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


def walk(rows: int = PAIRS) -> Walked:
    """Error and memory of every way."""
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
    return Walked(steps, gradients, peaks)


def measure(rounds: int) -> dict[str, Measured]:
    """Error, memory and time of every way."""
    return compare_ways(walk(), rounds=rounds)


def main() -> None:
    run_and_write(
        measure,
        title="InfoNCE, 256 pairs in 4 micro-batches",
        rounds=(3, 6),
        results="coupled",
        description=__doc__,
        notes={"GradCache, published": GRADCACHE_PUBLISHED},
    )
    if CachedMultipleNegativesRankingLoss is None:
        print("sentence-transformers is not installed: its cached loss was left out")


if __name__ == "__main__":
    main()
