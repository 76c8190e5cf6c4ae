"""Predicted peaks against every malloc, at 1, 3, 8, 32 rows and the whole batch.

    python -m benchmarks.memory_truth [--built-on] [NAME...]

The truth is the most bytes that this process had allocated during one update, less what it had before, plus weights, optimizer
and batch, which were there. Signs matter: minus is a prediction below the truth. A process per workload.
"""

import gc
import json
import sys
import warnings
from pathlib import Path
from time import process_time
from typing import Any

import torch

from anybatch import Accumulator, Update, plan
from anybatch.batches import tensors
from anybatch.memory import bytes_of, drop_gradients, optimizer_tensors
from anybatch.passes import Running
from benchmarks.every_malloc import Counted, in_own_process
from benchmarks.memory_held_out import HELD_OUT
from benchmarks.memory_workloads import BUILT_ON, ROWS, MemoryWorkload

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "memory_truth.json"
SIZES = (1, 3, 8, 32, ROWS)


def truth(work: MemoryWorkload, optimizer: torch.optim.Optimizer | None, size: int, counted: Counted) -> int:
    """The most bytes of one update in micro-batches of `size`, the second of its kind."""
    running = Running(**work.options)
    model, batch = work.model, work.batch
    if optimizer is None:
        run: Any = Accumulator(model, work.objective, micro_batch=size, running=running).backward
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if work.scaler else None
        run = Update(model, optimizer, work.objective, micro_batch=size, running=running, scaler=scaler, check="off")
    standing = 0
    for _ in range(2):
        if not work.has_gradients:
            drop_gradients(model.parameters())
        gc.collect()
        state = [] if optimizer is None else optimizer_tensors(optimizer)
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        standing = bytes_of([*model.parameters(), *model.buffers(), *state, *tensors(batch), *gradients])
        before = counted.live
        counted.restart()
        run(batch)
        peak = counted.peak - before
    return standing + peak


def compare(name: str) -> dict[str, Any]:
    """Predict, then run, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    work = {**BUILT_ON, **HELD_OUT}[name]()
    optimizer = None if work.has_gradients else work.optimizer(work.model.parameters())
    if work.has_gradients:
        for parameter in work.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    start = process_time()
    planned = plan(
        work.model,
        optimizer,
        work.objective,
        work.batch,
        memory="4GiB",
        running=Running(**work.options),
        checkpointing=False,
    )
    seconds = process_time() - start
    predicted = {size: planned.peak(size) for size in SIZES[:-1]} | {ROWS: planned.whole_bytes}
    counted = Counted()
    measured = {}
    for size in SIZES:
        try:
            measured[size] = truth(work, optimizer, size, counted)
        except ValueError:  # BatchNorm has no variance over one row
            continue
    return {
        "name": name,
        "method": planned.method,
        "seconds": round(seconds, 1),
        "error": {size: round(predicted[size] / most - 1, 4) for size, most in measured.items()},
        "measured": measured,
    }


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if "--here" in sys.argv:
        warnings.simplefilter("ignore")
        print(json.dumps(compare(names[0])))
        return
    chosen = BUILT_ON if "--built-on" in sys.argv else {**BUILT_ON, **HELD_OUT}
    results = []
    for name in names or chosen:
        ran = in_own_process("benchmarks.memory_truth", "--here", name)
        if ran.returncode:
            print(f"{name:28} failed: {ran.stderr.strip().splitlines()[-1][:160]}", flush=True)
            continue
        found = json.loads(ran.stdout.splitlines()[-1])
        results.append(found)
        row = "  ".join(f"{size:>3}: {error:+7.1%}" for size, error in found["error"].items())
        print(f"{name:28} {found['method']:13} {row}  ({found['seconds']} s)", flush=True)
    if not names and "--built-on" not in sys.argv:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
