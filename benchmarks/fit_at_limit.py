"""`Fit` at an exact limit: 20 updates of growing and ragged batches, where every malloc counts and none goes beyond.

    python -m benchmarks.fit_at_limit [NAME...]

The limit is what the largest batch takes in micro-batches of 20 rows, as counted. Model and optimizer are made first; batches,
plans and updates come under the limit, after one plan and two updates of a twin, so that what torch loads and keeps for the
whole process (some 5 MB: kernels, profiler) is there. A process per workload.
"""

import copy
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from anybatch import Fit, Update, plan
from anybatch.batches import map_tensors, take_rows
from anybatch.errors import AnybatchError
from anybatch.memory import bytes_of
from anybatch.passes import Running
from benchmarks.every_malloc import Counted, in_own_process
from benchmarks.memory_held_out import HELD_OUT
from benchmarks.memory_truth import truth
from benchmarks.memory_workloads import BUILT_ON, ROWS

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "fit_at_limit.json"
WORKLOADS = (
    "ResNet, micro",
    "ConvNeXt, depthwise 7x7",
    "U-Net with BatchNorm",
    "LSTM",
    "Llama, GQA",
    "coupled encoder",
    "MLP, drop",
    "GRU, bidirectional",
    "Conv3d, clip_value",
    "ViT, clip_norm",
    "BERT, autocast",
    "T5, Adafactor",
)
ROWS_AT_LIMIT = 20
ROWS_OF_UPDATES = (32, 48, ROWS, 50, 41, 57, ROWS, 36, 61, 44, 53, ROWS, 39, 47, 58, 33, ROWS, 55, 42, ROWS)


def at_limit(name: str) -> dict[str, Any]:
    """All updates of one workload, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    work = {**BUILT_ON, **HELD_OUT}[name]()
    counted = Counted()
    twin = copy.deepcopy(work)
    limit = truth(twin, twin.optimizer(twin.model.parameters()), ROWS_AT_LIMIT, counted)
    running = Running(**work.options)
    plan(twin.model, None, twin.objective, twin.batch, memory=limit, running=running, checkpointing=False)
    del twin
    model, fit = work.model, Fit(limit)
    optimizer = work.optimizer(model.parameters())
    update = Update(model, optimizer, work.objective, micro_batch=fit, running=running)
    gc.collect()
    standing = bytes_of([*model.parameters(), *model.buffers()])
    baseline, used, sizes, error = counted.live - standing, [], [], ""
    counted.restart()
    refused = 0
    with counted.limited(limit - standing):
        for rows in ROWS_OF_UPDATES:
            batch = map_tensors(take_rows(work.batch, slice(0, rows)), torch.clone)
            try:
                result = update(batch)
            except (AnybatchError, RuntimeError, MemoryError) as raised:
                error = f"{type(raised).__name__}: {str(raised)[:200]}"
                break
            refused += counted.num_refused
            used.append((counted.peak - baseline) / limit)
            sizes.append(-(-rows // result.micro_batches))
            del batch, result
            gc.collect()
            counted.restart()
    return {"name": name, "limit": limit, "refused": refused, "used": used, "rows": sizes, "error": error}


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if "--here" in sys.argv:
        warnings.simplefilter("ignore")
        print(json.dumps(at_limit(names[0])))
        return
    results = []
    for name in names or WORKLOADS:
        ran = in_own_process("benchmarks.fit_at_limit", "--here", name)
        if ran.returncode:
            print(f"{name:26} failed: {ran.stderr.strip().splitlines()[-1][:160]}", flush=True)
            continue
        found = json.loads(ran.stdout.splitlines()[-1])
        results.append(found)
        later, first = found["used"][1:], found["used"][:1]
        print(
            f"{name:26} {found['limit'] / 2**20:6.1f} MiB  {len(found['used'])} updates, {found['refused']} refused, used "
            f"{min(later, default=0):.2f} to {max(later, default=0):.2f}, first {max(first, default=0):.2f}, "
            f"rows {min(found['rows'], default=0)} to {max(found['rows'], default=0)}  {found['error']}",
            flush=True,
        )
    if not names:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
