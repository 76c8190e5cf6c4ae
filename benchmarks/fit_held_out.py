"""`Fit` at an exact limit, on twelve workloads that were written without a look at how `Fit` works.

    python -m benchmarks.fit_held_out [NAME...] [--rlimit] [--into FILE]

A process each, 20 updates of ragged and growing batches, the largest late. A twin runs first, so that what is loaded once is
there. The limit is what the largest batch takes in micro-batches of a quarter of its rows, every malloc counted. Then the model
is built anew: it, its optimizer, its batch, planning and updates are refused what goes beyond the limit. Used is the peak of an
update without its planning, of the limit. Below 0.85 counts from the second update on, where the batch was cut at all.
With `--rlimit` the kernel sets the limit (RLIMIT_DATA), for four workloads; only memory that runs out counts there.
"""

import argparse
import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes about itself

import torch

from anybatch import Fit
from benchmarks.every_malloc import Counted, in_own_process
from benchmarks.fit_held_out_workloads import ROWS, WORKLOADS, HeldOut

RESULTS = Path("docs/benchmarks/fit_held_out.json")
SECONDS = 400
ENOUGH = 0.85
M_MMAP_THRESHOLD = -3
WITH_RLIMIT = ("CNN, GroupNorm", "LSTM", "GPT, tokens", "MLP, drop")


def say(**facts: Any) -> None:
    """One line of JSON at once, so that what a process saw outlives it."""
    print(json.dumps(facts), flush=True)


def warm(workload: HeldOut) -> None:
    """Load what is loaded once: two updates of a small batch, and a plan with memory to spare."""
    rows, length = max(workload.rows // 12, 4), workload.length // 2
    plain = workload.update(max(rows // 3, 1))
    for _ in range(2):
        plain(workload.batch(rows, length))
    workload.update(Fit("8GiB"))(workload.batch(rows, length))


def need_of_a_quarter(workload: HeldOut, counted: Counted) -> int:
    """What two updates of the largest batch take in micro-batches of a quarter of its rows, model and all."""
    before = counted.live
    counted.restart()
    update = workload.update(-(-workload.rows // 4))
    for _ in range(2):
        update(workload.batch(workload.rows, workload.length))
    return counted.peak - before


@contextmanager
def kernel_limit(more: int) -> Iterator[None]:
    """Inside this block the kernel gives no more than `more` bytes of data beyond what the process has now."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@dataclass(slots=True)
class Parts:
    """What was allocated and refused in one update: while the micro-batch was chosen, and apart from that."""

    counted: Counted
    before: int
    limit: int
    planning: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        self.counted.restart()
        self.planning, self.update = ({"refused": 0, "used": 0.0} for _ in range(2))

    def note(self, part: dict[str, Any]) -> None:
        """What was since the last note belongs to that part."""
        part["refused"] += self.counted.num_refused
        part["used"] = max(part["used"], self.of_limit(self.counted.peak))
        self.counted.restart()

    def of_limit(self, num_bytes: int) -> float:
        return round((num_bytes - self.before) / self.limit, 4)

    def watch(self, fit: Fit) -> None:
        choose = fit.choose_for

        def chosen(*arguments: Any) -> None:
            self.note(self.update)
            try:
                choose(*arguments)
            finally:
                self.note(self.planning)

        fit.choose_for = chosen  # type: ignore[method-assign]


def train(workload: HeldOut, limit: int, counted: Counted) -> None:
    """Every update at the limit; what was seen of each is said, also of one that fails. Kept is what stands after it."""
    parts = Parts(counted, counted.live, limit)
    fit = Fit(limit)
    parts.watch(fit)
    update = workload.update(fit)
    for number in range(len(ROWS)):
        facts: dict[str, Any] = {"update": number + 1, "rows": workload.rows_of(number)}
        parts.start()
        start = time.process_time()
        try:
            result = update(workload.numbered(number))
            facts |= {"micro_batches": result.micro_batches, "retries": result.retries}
        finally:
            parts.note(parts.update)
            facts |= parts.update | {f"{key}_planning": value for key, value in parts.planning.items()}
            facts["kept"] = parts.of_limit(counted.live)
            if fit.choice is not None:
                facts |= {"kind": fit.choice.kind, "size": fit.choice.size}
            say(**facts, seconds=round(time.process_time() - start, 2))


def run_here(name: str, *, rlimit: bool) -> None:
    """One workload in this process, which counts its mallocs."""
    workload, counted = WORKLOADS[name], Counted()
    if rlimit:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # else glibc keeps freed tensors in pieces, up to 32 MB each
    torch.manual_seed(0)
    warm(workload)
    gc.collect()
    limit = need_of_a_quarter(workload, counted)
    gc.collect()
    say(limit=limit, warming=round(time.process_time(), 1))
    torch.manual_seed(1)
    error = None
    with kernel_limit(limit) if rlimit else counted.limited(limit):
        try:
            train(workload, limit, counted)
        except Exception as failure:  # of any kind: it is what is measured
            error = f"{type(failure).__name__}: {failure}"[:300]
    say(error=error, process_seconds=round(time.process_time(), 1))


def measure(name: str, *, rlimit: bool) -> dict[str, Any]:
    """One workload in its own process: what it said, and how it ended."""
    arguments = ["--here", name, *(["--rlimit"] if rlimit else [])]
    ended = None
    try:
        process = in_own_process("benchmarks.fit_held_out", *arguments, timeout=SECONDS)
        out = process.stdout
        if process.returncode < 0:
            ended = f"the process died of {signal.Signals(-process.returncode).name}"
        elif process.returncode:
            ended = process.stderr.strip().splitlines()[-1][:300]
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        ended = f"not done in {SECONDS} seconds"
    said = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    updates = [line for line in said if "update" in line]
    rest = {key: value for line in said if "update" not in line for key, value in line.items()}
    return {"limit": None, "process_seconds": None, **rest, "error": ended or rest.get("error"), "updates": updates}


def table_row(name: str, case: dict[str, Any]) -> tuple[str, ...]:
    """What one workload came to, as cells."""
    updates = case["updates"]
    later = [one for one in updates[1:] if "micro_batches" in one]
    cut = [one["used"] for one in later if one["micro_batches"] > 1]
    num_below = sum(used < ENOUGH for used in cut)
    return (
        name,
        f"{case['limit'] / 2**20:.0f} MiB" if case["limit"] else "none",
        str(len([one for one in updates if "micro_batches" in one])),
        str(sum(one.get("refused_planning", 0) for one in updates)),
        str(sum(one["refused"] for one in updates)),
        str(sum(one.get("retries", 0) for one in updates)),
        f"{min(cut):.2f} to {max(cut):.2f}" if cut else "",
        f"{num_below} of {len(cut)}",
        str(len(later) - len(cut)),
        f"{case['process_seconds'] or sum(one['seconds'] for one in updates):.0f}",
        case["error"] or "",
    )


HEAD = (
    "workload",
    "limit",
    "done",
    "refused planning",
    "refused",
    "retries",
    "used when cut",
    "below 0.85",
    "whole",
    "seconds",
    "error",
)


def show(cases: dict[str, dict[str, Any]]) -> None:
    print("| " + " | ".join(HEAD) + " |\n" + "| --- " * len(HEAD) + "|")
    for name, case in cases.items():
        print("| " + " | ".join(table_row(name, case)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--rlimit", action="store_true", help="RLIMIT_DATA instead of a counting allocator")
    parser.add_argument("--into", type=Path, default=RESULTS, help="the results, which those measured now are put into")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in WORKLOADS]:
        parser.error(f"no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    if asked.here:
        warnings.simplefilter("ignore")
        run_here(asked.names[0], rlimit=asked.rlimit)
        return
    kind = "rlimit" if asked.rlimit else "exact"
    results = json.loads(asked.into.read_text()) if asked.into.exists() else {}
    results["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__}
    cases = results.setdefault(kind, {})
    for name in asked.names or (WITH_RLIMIT if asked.rlimit else WORKLOADS):
        cases[name] = measure(name, rlimit=asked.rlimit)
        asked.into.write_text(json.dumps(results, indent=1) + "\n")
        show({name: cases[name]})
    show(cases)


if __name__ == "__main__":
    main()
