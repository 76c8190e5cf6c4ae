"""Two ranks under DDP and FSDP2: what one synchronisation per update saves, beside Accelerate and Lightning.

    python -m benchmarks.ranks [--quick]

Time per batch of 8 micro-batches per rank as a ratio to the same loop with a synchronisation per micro-batch, interleaved
on the same two processes (gloo, one thread each), which wait for each other before every batch. FSDP2: parameters gathered
again for each pass against parameters kept between micro-batches, time and peak memory. Ranks share one machine and its
memory: a network between them makes synchronising dearer, not cheaper.
"""

import copy
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from anybatch import Update, supervised
from anybatch.core import own_part
from benchmarks.meter import Contender, Timing, interleave, peak_bytes
from benchmarks.models import SmallTransformer
from benchmarks.overhead import lightning_fit
from benchmarks.pictures import ranks_picture
from benchmarks.results import DOCS, is_quick, print_timings, write_results

MICRO_BATCHES = 8


def works() -> dict[str, tuple[nn.Module, tuple[Tensor, Tensor]]]:
    """Models and this rank's part of a batch, to be cut into 8 micro-batches."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    transformer = SmallTransformer()
    torch.manual_seed(dist.get_rank())
    num_rows, tokens = 16 * MICRO_BATCHES, torch.randint(0, 256, (4 * MICRO_BATCHES, 64))
    return {
        "MLP 1.6 M, 2 x 8 x 16 rows": (mlp, (torch.randn(num_rows, 512), torch.randint(0, 10, (num_rows,)))),
        "transformer 4 x 128, 2 x 8 x 4 x 64 tokens": (transformer, (tokens, tokens.roll(-1, 1))),
    }


def parts_of(batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = (column.chunk(MICRO_BATCHES) for column in batch)
    return list(zip(inputs, targets, strict=True))


def by_hand(model: nn.Module, batch: tuple[Tensor, Tensor], *, syncs_each: bool) -> Contender:
    """Equal micro-batches, so that the mean of means is right: this loop is the fastest that is."""
    wrapped, criterion, parts = DistributedDataParallel(copy.deepcopy(model)), nn.CrossEntropyLoss(), parts_of(batch)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(parts, start=1):
            wrapped.require_backward_grad_sync = syncs_each or number == len(parts)
            (criterion(wrapped(inputs), targets) / len(parts)).backward()
        optimizer.step()

    return run


def with_anybatch(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> Contender:
    wrapped = model if options else DistributedDataParallel(copy.deepcopy(model))
    size = len(batch[0]) // MICRO_BATCHES
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    update = Update(wrapped, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=size, **options)

    def run() -> None:
        update(batch)

    return run


def with_accelerate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Contender:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    wrapped = copy.deepcopy(model)
    wrapped, optimizer = accelerator.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-3))
    criterion, parts = nn.CrossEntropyLoss(), parts_of(batch)

    def run() -> None:
        for inputs, targets in parts:
            with accelerator.accumulate(wrapped):
                accelerator.backward(criterion(wrapped(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

    return run


def with_lightning(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Contender:
    def options() -> dict[str, Any]:
        strategy = DDPStrategy(process_group_backend="gloo")
        return {"strategy": strategy, "devices": dist.get_world_size(), "use_distributed_sampler": False}

    return lightning_fit(model, parts_of(batch), 3, options)


def together(run: Contender) -> Contender:
    """The same work, begun by both ranks at the same time."""

    def waiting() -> float | None:
        dist.barrier()
        return run()

    return waiting


def replicated(model: nn.Module, batch: tuple[Tensor, Tensor], rounds: int) -> dict[str, Timing]:
    contenders: dict[str, Callable[..., Contender]] = {
        "DDP, synchronised per micro-batch": lambda *work: by_hand(*work, syncs_each=True),
        "DDP, no_sync by hand": lambda *work: by_hand(*work, syncs_each=False),
        "anybatch Update": with_anybatch,
        "Accelerate": with_accelerate,
        "Lightning": with_lightning,
    }
    ready = {name: together(make(model, batch)) for name, make in contenders.items()}
    return interleave(ready, rounds=rounds, repeats=1)


def sharded(model: nn.Module, batch: tuple[Tensor, Tensor], rounds: int) -> tuple[dict[str, Timing], dict[str, int]]:
    ready, peaks = {}, {}
    for name, reshard in {"gathered again in each pass": True, "kept between micro-batches": False}.items():
        wrapped = copy.deepcopy(model)
        for block in wrapped.modules():
            if isinstance(block, nn.TransformerEncoderLayer):
                fully_shard(block)
        fully_shard(wrapped)
        run = with_anybatch(wrapped, batch, reshard=reshard)
        run()
        ready[name] = together(run)
        peaks[name] = peak_bytes(run, [own_part(parameter.detach()) for parameter in wrapped.parameters()])
    return interleave(ready, rounds=rounds, repeats=1), peaks


def measure(*, rounds: int) -> None:
    """Run on each rank; rank 0 prints and writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    is_first, ddp = dist.get_rank() == 0, {}
    for name, (model, batch) in works().items():
        timings = replicated(model, batch, rounds)
        ddp[name] = {contender: asdict(timing) for contender, timing in timings.items()}
        if is_first:
            print_timings(f"{name}: time per batch, as a ratio to the first", timings)
    model, batch = works()["transformer 4 x 128, 2 x 8 x 4 x 64 tokens"]
    timings, peaks = sharded(model, batch, rounds)
    fsdp = {name: {**asdict(timing), "peak_bytes": peaks[name]} for name, timing in timings.items()}
    if is_first:
        notes = {name: f"   peak {peak / 2**20:.1f} MiB" for name, peak in peaks.items()}
        print_timings("FSDP2, the same transformer; parameters: time as a ratio to the first", timings, notes)
        shape = {"ranks": dist.get_world_size(), "micro_batches_per_rank": MICRO_BATCHES}
        write_results("ranks", {**shape, "ddp": ddp, "fsdp": fsdp}, "accelerate", "lightning")
        (DOCS / "pictures" / "ranks.svg").write_text(ranks_picture(ddp, fsdp))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    rounds = 5 if is_quick(__doc__, "fewer rounds, and noisier") else 30
    if "RANK" in os.environ:
        measure(rounds=rounds)
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, "-m", "benchmarks.ranks", *sys.argv[1:]], check=True, env=environment)


if __name__ == "__main__":
    main()
