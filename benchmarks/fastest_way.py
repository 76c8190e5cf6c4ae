"""The ways that fit a memory in the order that a plan predicts, and as real updates in turn have them.

Eight workloads whose batch has to be cut: the plan's `ranking` from measured passes, then whole updates of every way,
interleaved. An order is right where the way that is predicted to be the fastest is measured so, or within 3 % of it. With
--processor both are the processor's time, which a busy machine touches less than it touches the clock on the wall.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Plan, Update, huggingface, plan
from anybatch.memory.predicting import recomputing_of
from anybatch.memory.ranking import pass_times
from benchmarks.gpt import ByteGPTForCausalLM
from benchmarks.memory_workloads import CLASSES, ConvNeXtBlock, MemoryWorkload, causal, images, llama
from benchmarks.meter import Timing, interleave
from benchmarks.models import SmallViT

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "fastest_way.json"
NEAR = 1.03


class Residual(nn.Module):
    """A feed-forward block with a way past it."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mix(x))


def stacked(width: int, count: int, dropout: float = 0.0) -> nn.Module:
    blocks = nn.Sequential(*(Residual(width, dropout) for _ in range(count)))
    return nn.Sequential(nn.Linear(64, width), blocks, nn.Linear(width, 10))


def rows_of(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64), torch.randint(0, 10, (count,))


def convolutions() -> nn.Module:
    blocks = nn.Sequential(*(ConvNeXtBlock(16) for _ in range(6)))
    return nn.Sequential(nn.Conv2d(3, 16, 4, 4), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=6))


WORKLOADS: dict[str, tuple[Callable[[], MemoryWorkload], int]] = {
    "Llama, 8 layers, memory of 2 rows": (
        lambda: MemoryWorkload(model=llama(layers=8, width=64), objective=huggingface(), batch=causal(48)),
        2,
    ),
    "Llama, 8 layers, memory of 16 rows": (
        lambda: MemoryWorkload(model=llama(layers=8, width=64), objective=huggingface(), batch=causal(48)),
        16,
    ),
    "BERT with dropout, memory of 4 rows": (
        lambda: MemoryWorkload(model=bert(), objective=huggingface(), batch=causal(32)),
        4,
    ),
    "GPT, 4 layers, memory of 4 rows": (
        lambda: MemoryWorkload(model=ByteGPTForCausalLM(width=64), objective=huggingface(), batch=causal(48)),
        4,
    ),
    "ViT, memory of 4 rows": (lambda: MemoryWorkload(model=SmallViT(), objective=CLASSES, batch=images()), 4),
    "blocks of 32, memory of 2 rows": (
        lambda: MemoryWorkload(model=stacked(32, 16), objective=CLASSES, batch=rows_of(512)),
        2,
    ),
    "blocks of 256, memory of 64 rows": (
        lambda: MemoryWorkload(model=stacked(256, 8), objective=CLASSES, batch=rows_of(512)),
        64,
    ),
    "convolutions, memory of 4 rows": (
        lambda: MemoryWorkload(model=convolutions(), objective=CLASSES, batch=images()),
        4,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One way: predicted and measured seconds of an update's passes."""

    way: str
    micro_batch: int
    passes: int
    peak: int
    predicted: float
    measured: float


def compare(
    make: Callable[[], MemoryWorkload], rows: int, rounds: int, clock: Callable[[], float] = perf_counter
) -> list[Compared]:
    """The ways of one workload, as predicted first and fastest, with what real updates take."""
    torch.manual_seed(0)
    work = make()
    work.model.train()
    optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-3)
    loose: Plan = plan(work.model, optimizer, work.objective, work.batch, memory="8GiB", ranking=False)
    found = plan(work.model, optimizer, work.objective, work.batch, memory=loose.peak(rows), margin=0.0)
    switch = recomputing_of(work.model).on
    steps = {}
    for way in found.ranking:
        update = Update(work.model, optimizer, work.objective, micro_batch=way.micro_batch, check="off")
        steps[way.way] = _step(update, work.batch, switch if way.kind == "checkpointing" else nullcontext)
    times: dict[str, Timing] = interleave(steps, rounds=rounds, repeats=1, clock=clock) if len(steps) > 1 else {}
    return [
        Compared(
            way=way.way,
            micro_batch=way.micro_batch,
            passes=way.passes,
            peak=way.peak,
            predicted=way.seconds or float("nan"),
            measured=times[way.way].seconds if times else float("nan"),
        )
        for way in found.ranking
    ]


def _step(update: Update, batch: Any, switch: Callable[[], Any]) -> Callable[[], None]:
    def step() -> None:
        with switch():
            update(batch)

    return step


def is_right(ways: list[Compared]) -> bool:
    """True where the way predicted to be the fastest is so, or as good as."""
    return ways[0].measured <= NEAR * min(way.measured for way in ways)


def lines(name: str, ways: list[Compared]) -> Iterator[str]:
    verdict = "only one way" if len(ways) == 1 else "right" if is_right(ways) else "wrong"
    for number, way in enumerate(ways):
        head = f"| {name if number == 0 else ''} | {way.way} | {way.micro_batch} x {way.passes} "
        yield (
            head
            + f"| {1000 * way.predicted:.0f} ms | {1000 * way.measured:.0f} ms | {verdict if number == 0 else ''} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9: noisier")
    parser.add_argument("--processor", action="store_true", help="the processor's time instead of the clock's")
    parser.add_argument("names", nargs="*", help="workloads, by the beginning of their names; all of them without any")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = process_time if options.processor else perf_counter
    pass_times.perf_counter = clock
    found = {}
    print("| model | way | rows x passes | predicted | measured | order |\n| --- | --- | --- | --- | --- | --- |")
    for name, (make, rows) in WORKLOADS.items():
        if options.names and not name.startswith(tuple(options.names)):
            continue
        ways = compare(make, rows, 3 if options.quick else 9, clock)
        found[name] = [asdict(way) for way in ways]
        for line in lines(name, ways):
            print(line, flush=True)
    if not options.names:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
