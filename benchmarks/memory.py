"""Predicted against measured peak memory of an update, over micro-batches 1 to 64; and plans of models too large to run here.

    python -m benchmarks.memory [--quick]

Measured is the profiler's record of every allocation, with parameters, optimizer state and the batch that were there before.
The plan is of a batch of 128 rows; each size is measured on its first four micro-batches, two from 48 rows on, and the rows
that are left out are taken off the prediction. Times are the processor's, because neighbours on a busy machine touch them
less than the clock on the wall.
"""

import json
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Objective, Update, huggingface, measure_peak, plan, supervised
from anybatch.core.batch import tensors
from anybatch.memory.meter import bytes_of
from benchmarks.models import (
    LongAttention,
    Recurrent,
    ResidualNet,
    SentenceEncoder,
    SmallTransformer,
    SmallUNet,
    SmallViT,
)
from benchmarks.pictures import memory_picture
from benchmarks.results import DOCS, is_quick, write_results

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ROWS = 128


@dataclass(frozen=True, slots=True)
class Case:
    """A model, how it learns, and what from."""

    model: nn.Module
    objective: Objective
    batch: Any
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Peaks in bytes by micro-batch size."""

    method: str
    predicted: dict[int, int]
    measured: dict[int, int]
    worst: float
    """The largest relative error."""


def _tokens(length: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 256, (ROWS, length))
    return drawn, drawn.roll(-1, 1)


def _images(side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, side, side), torch.randint(0, 10, (ROWS,))


def _checkpointed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0], is_checkpointed=True), batch[1])


def cases() -> dict[str, Callable[[], Case]]:
    """Everything that is compared, made when it is its turn."""
    classes = supervised(nn.CrossEntropyLoss())
    pixels = supervised(nn.MSELoss())
    mlp = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    vectors = torch.randn(ROWS, 64), torch.randint(0, 10, (ROWS,))
    sgd = torch.optim.SGD
    return {
        "MLP": lambda: Case(nn.Sequential(*mlp), classes, vectors),
        "GPT, AdamW": lambda: Case(SmallTransformer(), classes, _tokens(64)),
        "GPT, SGD": lambda: Case(SmallTransformer(), classes, _tokens(64), sgd),
        "CNN with BatchNorm": lambda: Case(ResidualNet(), classes, _images(32), sgd),
        "attention, 512 long": lambda: Case(LongAttention(), classes, _tokens(512)),
        "gradient checkpointing": lambda: Case(
            SentenceEncoder(), Objective(_checkpointed), (_tokens(64)[0], torch.randint(0, 128, (ROWS,)))
        ),
        "LSTM": lambda: Case(Recurrent(), classes, _tokens(32)),
        "U-Net": lambda: Case(SmallUNet(), pixels, (_images(32)[0], torch.randn(ROWS, 1, 32, 32))),
        "vision transformer": lambda: Case(SmallViT(), classes, _images(32)),
    }


def compare(case: Case, sizes: tuple[int, ...] = SIZES) -> Compared:
    """Predict, then run."""
    optimizer = case.optimizer(case.model.parameters(), lr=1e-3)
    planned = plan(
        case.model, optimizer, case.objective, case.batch, memory="1GiB", batch_norm="micro", checkpointing=False
    )
    measured, predicted, whole = {}, {}, bytes_of(tensors(case.batch))
    for size in sizes:
        count = min(4, ROWS // size) * size  # all micro-batches equal
        batch = tuple(part[:count].clone() for part in case.batch)
        update = Update(case.model, optimizer, case.objective, micro_batch=size, batch_norm="micro")
        if not measured:
            update(batch)  # fills the optimizer's state
        measured[size] = measure_peak(update, batch)[1]
        peak = replace(planned.peaks, num_rows=count).peak(size)
        predicted[size] = peak - whole + bytes_of(tensors(batch))
    worst = max(abs(predicted[size] / measured[size] - 1) for size in sizes)
    return Compared(method=planned.method, predicted=predicted, measured=measured, worst=worst)


def large(name: str, **config: int) -> dict[str, Any]:
    """A GPT-2 on the meta device, planned for a card that is not here."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**config))
        tokens = torch.zeros(64, 1024, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    start = process_time()
    batch = {"input_ids": tokens, "labels": tokens}
    planned = plan(model, optimizer, huggingface(), batch, memory="80GB", device="cuda", checkpointing=False)
    seconds = process_time() - start
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "processor_seconds": round(seconds, 1),
        "resident_bytes_of_the_process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "micro_batch_for_80GB": planned.micro_batch,
        "peak_bytes": planned.peak_bytes,
        "whole_bytes": planned.whole_bytes,
    }


def in_own_process(name: str, **config: int) -> dict[str, Any]:
    """`large`, where nothing has run before: a process's resident memory only grows."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(large, name, **config).result()


def main() -> None:
    quick = is_quick(__doc__, "four sizes instead of twelve, and one large model")
    sizes = (1, 4, 16, 64) if quick else SIZES
    torch.manual_seed(0)
    compared = {}
    for name, make in cases().items():
        found = compare(make(), sizes)
        compared[name] = asdict(found)
        print(f"{name:24} {found.method:13} off by {found.worst:8.3%} at worst", flush=True)
    (DOCS / "pictures" / "memory.svg").write_text(memory_picture(compared))
    planned = [in_own_process("GPT-2 124M")]
    if not quick:
        planned.append(in_own_process("GPT-2 XL 1.5B", n_embd=1600, n_layer=48, n_head=25))
    for one in planned:
        print(json.dumps(one))
    write_results("memory", {"rows": ROWS, "cases": compared, "large": planned})


if __name__ == "__main__":
    main()
