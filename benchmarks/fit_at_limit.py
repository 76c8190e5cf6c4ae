"""`Fit` at an exact limit: 20 updates of growing and ragged batches, where every malloc counts and none goes beyond.

    python -m benchmarks.fit_at_limit [NAME...]

The limit is what the largest batch takes in micro-batches of a quarter of its rows, as counted. Model and optimizer are made
first; batches, plans and updates come under the limit, after updates of a twin, planned and of the size at the limit, so
that what torch and Python load once for a process (5 to 15 MB) is there. A process per workload. Rows are repeated for larger
limits, because Python's own objects, and what kernels keep for each shape that they meet, take 1 to 9 MB at any limit.
"""

import copy
import gc
import json
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import torch

from anybatch import Fit, Update
from anybatch.batches import Batch, map_tensors, take_rows
from anybatch.errors import AnybatchError
from anybatch.memory import bytes_of
from anybatch.passes import Running
from benchmarks.every_malloc import Counted, in_own_process
from benchmarks.memory_held_out import HELD_OUT
from benchmarks.memory_truth import truth
from benchmarks.memory_workloads import BUILT_ON, ROWS

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "fit_at_limit.json"
WORKLOADS = {
    "ResNet, micro": 2,
    "ConvNeXt, depthwise 7x7": 2,
    "U-Net with BatchNorm": 2,
    "LSTM": 8,
    "Llama, GQA": 1,
    "coupled encoder": 1,
    "MLP, drop": 128,
    "GRU, bidirectional": 4,
    "Conv3d, clip_value": 8,
    "ViT, clip_norm": 2,
    "BERT, autocast": 8,
    "T5, Adafactor": 1,
}
"""How often the 64 rows of each are repeated."""
QUARTER = 16
"""The rows in 64 of a micro-batch at the limit."""
ROWS_OF_UPDATES = (32, 48, 41, 56, 50, 33, 57, 36, 61, 44, 53, ROWS, 39, 47, 58, ROWS, 37, 55, 42, ROWS)
"""In 64, as many as each batch has: the largest comes late."""
ENOUGH = 0.85


def repeated(batch: Batch, times: int) -> Batch:
    """The batch with so many times its rows."""
    return map_tensors(batch, lambda tensor: torch.cat([tensor] * times))


def at_limit(name: str) -> dict[str, Any]:
    """All updates of one workload, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    times = WORKLOADS[name]
    work = {**BUILT_ON, **HELD_OUT}[name]()
    work = replace(work, batch=repeated(work.batch, times))
    counted, running = Counted(), Running(**work.options)
    twin = copy.deepcopy(work)
    optimizer = twin.optimizer(twin.model.parameters())
    limit = truth(twin, optimizer, QUARTER * times, counted)
    first = Update(twin.model, optimizer, twin.objective, micro_batch=Fit(limit, most=4), running=running)
    for _ in range(2):
        first(take_rows(twin.batch, slice(0, 8)))
    del twin, optimizer, first
    model = work.model
    update = Update(model, work.optimizer(model.parameters()), work.objective, micro_batch=Fit(limit), running=running)
    gc.collect()
    standing = bytes_of([*model.parameters(), *model.buffers()])
    baseline, error = counted.live - standing, ""
    used: list[float] = []
    sizes: list[int] = []
    counted.restart()
    refused, begin = 0, process_time()
    with counted.limited(limit - standing):
        for share in ROWS_OF_UPDATES:
            rows = share * times
            batch = map_tensors(take_rows(work.batch, slice(0, rows)), torch.clone)
            try:
                result = update(batch)
            except (AnybatchError, RuntimeError, MemoryError) as raised:
                traceback.print_exc()
                error = f"{type(raised).__name__}: {str(raised)[:200]}"
                break
            finally:
                refused += counted.num_refused
            used.append((counted.peak - baseline) / limit)
            sizes.append(-(-rows // result.micro_batches))
            del batch, result
            gc.collect()
            counted.restart()
    found = {"name": name, "rows": ROWS * times, "limit": limit, "refused": refused, "used": used, "sizes": sizes}
    return found | {"error": error, "seconds": round(process_time() - begin)}


def show(found: dict[str, Any]) -> str:
    """A row of the table."""
    later = found["used"][1:]
    low = [used for used in later if used < ENOUGH]
    least, most = min(later, default=0), max(later, default=0)
    return (
        f"{found['name']:26} {found['limit'] / 2**20:6.1f} MiB  {len(found['used'])} updates, {found['refused']} refused, used "
        f"{least:.2f} to {most:.2f} ({len(low)} below {ENOUGH}), micro-batches of {min(found['sizes'], default=0)} to "
        f"{max(found['sizes'], default=0)} rows, {found['seconds']} s  {found['error']}"
    )


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if "--here" in sys.argv:
        warnings.simplefilter("ignore")
        print(json.dumps(at_limit(names[0])))
        return
    for name in names or WORKLOADS:
        ran = in_own_process("benchmarks.fit_at_limit", "--here", name)
        if ran.returncode:
            print(f"{name:26} failed with {ran.returncode}: {ran.stderr.strip().splitlines()[-1][:160]}", flush=True)
            continue
        found = json.loads(ran.stdout.splitlines()[-1])
        print(show(found), flush=True)
        known = {one["name"]: one for one in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
        known[name] = found
        RESULTS.write_text(json.dumps([known[one] for one in WORKLOADS if one in known], indent=1) + "\n")


if __name__ == "__main__":
    main()
