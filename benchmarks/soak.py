"""Runs under harm: kills, ranks that hang, full disks, other numbers of ranks, 20,000 updates. All end with the same weights.

    python -m benchmarks.soak --kills 100                     # all of it, in some 25 minutes
    python -m benchmarks.soak --part kills --kills 20 --seed 5   # a piece: kills, faults, ranks, disk, growth

kills: SIGKILL at random, aimed at updates, validation, checkpoints and the page, of one process or of one rank (DDP, FSDP2),
over tasks and precisions. Each run goes on until it is finished, and ends bit for bit as one that nobody killed; `auto`, whose
cut goes by the clock, up to rounding. faults: a rank is killed, hangs, raises or runs out of memory at each stage; the others
end within `--rank-timeout`, and all ranks started again end with the right weights.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.forked_ranks import Running, preload, start
from benchmarks.kill_resume import end_of
from benchmarks.rank_faults import KINDS, STAGES

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "soak.json"
AIMS = ("update", "validation", "checkpoint", "page", "start")
PATIENCE = 20.0
"""Seconds that ranks wait for each other here; a lost connection is seen at once, a rank that hangs after this."""


@dataclass(frozen=True)
class Setup:
    """One way to train."""

    task: str
    options: str
    ranks: int = 1
    is_timed: bool = False
    """Its cut goes by the clock: weights are the same up to the order of additions."""

    @property
    def arguments(self) -> list[str]:
        return ["train", self.task, *self.options.split(), "-q", "--rank-timeout", str(PATIENCE)]

    def __str__(self) -> str:
        return f"{self.task} {self.options}, {self.ranks} ranks" if self.ranks > 1 else f"{self.task} {self.options}"


SETUPS = (
    Setup("textbook", "--epochs 4 --save-every 3"),
    Setup("digits", "--updates 24 --batch-size 24 --micro-batch 8 --save-every 3 --precision bf16"),
    Setup("textbook", "--epochs 4 --save-every 3 --parallel ddp", ranks=2),
    Setup("stdlib", "--updates 8 --batch-size 12 --save-every 2"),
    Setup("textbook", "--epochs 4 --save-every 3 --parallel fsdp2", ranks=2),
    Setup("pairs", "--updates 10 --batch-size 24 --micro-batch 8 --save-every 2"),
    Setup("textbook", "--epochs 4 --save-every 3 --micro-batch auto", is_timed=True),
    Setup("stdlib", "--updates 6 --batch-size 12 --save-every 2 --parallel ddp --precision bf16", ranks=2),
)


def kills(folder: Path, count: int, moments: random.Random) -> Iterator[dict[str, Any]]:
    """So many kills, over all setups in turn."""
    done, number = 0, moments.randrange(len(SETUPS))
    while done < count:
        setup = SETUPS[number % len(SETUPS)]
        expected = _undisturbed(folder, setup)
        run, wanted = folder / f"killed-{number}", min(moments.randint(2, 5), count - done)
        hit: list[str] = []
        while not _is_finished(run):
            running = _started(setup, run)
            if len(hit) < wanted and _killed(running, run, aim := moments.choice(AIMS), moments):
                hit.append(aim)
            codes = running.wait()
            if not hit and any(codes):
                raise RuntimeError(f"{setup} ended with {codes}: {run.with_suffix('.log').read_text()}")
        done, number = done + len(hit), number + 1
        yield {"run": str(setup), "kills": hit, "is_equal": _ends_as(run, expected, is_timed=setup.is_timed)}


def _killed(running: Running, run: Path, aim: str, moments: random.Random) -> bool:
    """Kill a process at the moment aimed at; False where the run ended first."""
    is_there = _moment(run, aim, moments)
    while not is_there():
        if len(running.alive()) < len(running.pids):
            return False
        time.sleep(0.0005)
    time.sleep(moments.uniform(0.0, 0.01))
    if len(running.alive()) < len(running.pids):
        return False
    running.kill(moments.randrange(len(running.pids)))
    return True


def _moment(run: Path, aim: str, moments: random.Random) -> Callable[[], bool]:
    """True from the moment on that is aimed at."""
    first, more = _num_lines(run, "update"), moments.randint(1, 12)
    end = time.monotonic() + moments.uniform(0.0, 1.0)
    if aim == "start":
        return lambda: time.monotonic() > end
    if aim == "checkpoint":
        return lambda: any((run / "checkpoints").glob(".update-*"))
    if aim == "page":
        return lambda: any(run.glob(".report.html.*"))
    if aim == "validation":
        return lambda: _num_lines(run, "update") > first and _num_lines(run, "update") % 16 == 0
    return lambda: _num_lines(run, "update") >= first + more


def _num_lines(run: Path, event: str) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(f'"event": "{event}"'.encode()) if path.exists() else 0


def _started(setup: Setup, run: Path, **harm: Any) -> Running:
    """As it would be started again by hand, or by a launcher."""
    is_there = (run / "run.json").exists()
    arguments = [*setup.arguments, "--out", str(run)]
    if is_there and setup.ranks == 1:
        arguments = ["train", "--resume", str(run), "-q"]
    return start(arguments, ranks=setup.ranks, log=run.with_suffix(".log"), **harm)


def _undisturbed(folder: Path, setup: Setup) -> Path:
    run = folder / f"undisturbed-{SETUPS.index(setup) if setup in SETUPS else hash(setup)}"
    if not run.exists():
        codes = _started(setup, run).wait()
        assert set(codes) == {0}, run.with_suffix(".log").read_text()
    return run


def _is_finished(run: Path) -> bool:
    from anybatch.records import RunFolder

    has_page = (run / "report.html").exists()
    return has_page and (run / "run.json").exists() and RunFolder(run).read_run().status == "finished"


def _ends_as(run: Path, expected: Path, *, is_timed: bool) -> bool:
    if is_timed:
        return _distance(run, expected) < 1e-5
    return end_of(run) == end_of(expected)


def _distance(run: Path, other: Path) -> float:
    import torch

    from anybatch.training.checkpoints.saving import read

    one, two = (read(path / "checkpoints")[1]["model"] for path in (run, other))  # type: ignore[index]
    first, second = (torch.cat([value.double().flatten() for value in each.values()]) for each in (one, two))
    return float((first - second).norm() / second.norm())


def faults(folder: Path, parallel: str, stages: list[str]) -> Iterator[dict[str, Any]]:
    """Rank 1 fails once at each stage, in each way; the time that rank 0 took to end, and whether the restart ended right."""
    setup = Setup("textbook", f"--epochs 2 --save-every 3 --parallel {parallel}", ranks=2)
    expected = _undisturbed(folder, setup)
    for stage in stages:
        for kind in KINDS:
            run = folder / f"{parallel}-{stage}-{kind}".replace(" ", "-")
            began = time.monotonic()
            running = _started(setup, run, fault=lambda rank: STAGES[stage](kind) if rank == 1 else None)  # noqa: B023
            while running.pids[0] in running.alive() and time.monotonic() < began + 120:
                time.sleep(0.01)
            seconds = time.monotonic() - began
            codes = running.wait(0.0 if kind == "hangs" else 30.0)
            again = _started(setup, run).wait()
            is_right = again == [0, 0] and _ends_as(run, expected, is_timed=False)
            has_ended = codes[0] not in (0, -signal.SIGKILL)
            yield {
                "fault": f"{parallel}: {kind} in {stage}",
                "seconds": round(seconds, 1),
                "is_equal": is_right and has_ended,
            }


def ranks(folder: Path) -> Iterator[dict[str, Any]]:
    """A run that goes from 2 to 1 to 4 to 3 ranks, each stopped by SIGTERM, against one process."""
    for parallel in ("ddp", "fsdp2"):
        options = f"--epochs 40 --save-every 1000 --parallel {parallel}"
        expected = _undisturbed(folder, Setup("textbook", options))
        run = folder / f"ranks-{parallel}"
        for number in (2, 1, 4, 3):
            target = _num_lines(run, "update") + 60
            arguments = (
                ["train", "--resume", str(run), "-q"] if run.exists() else ["train", "textbook", *options.split(), "-q"]
            )
            running = start(
                arguments if run.exists() else [*arguments, "--out", str(run)],
                ranks=number,
                log=run.with_suffix(".log"),
            )
            while number != 3 and _num_lines(run, "update") < target and running.alive():
                time.sleep(0.001)
            if number != 3:
                os.kill(running.pids[-1], signal.SIGTERM)
            assert set(running.wait()) == {0 if number == 3 else 1}, run.with_suffix(".log").read_text()
        yield {
            "ranks": f"{parallel}: 2, 1, 4, 3",
            "distance": (off := _distance(run, expected)),
            "is_equal": off < 1e-5,
        }


def disk(folder: Path, moments: random.Random) -> Iterator[dict[str, Any]]:
    """The disk is full again and again: one line, exit code 2, and what goes on with room ends the same."""
    setup = SETUPS[0]
    expected = _undisturbed(folder, setup)
    for number in range(10):
        run = folder / f"disk-{number}"
        codes = [_started(setup, run, disk=moments.randint(500, 20_000)).wait()[0] for _ in range(2)]
        said = run.with_suffix(".log").read_text().splitlines()
        is_told = (
            set(codes) <= {0, 2} and len(said) == codes.count(2) and all(line.startswith("anybatch: ") for line in said)
        )
        _started(setup, run).wait()
        yield {"disk": codes, "is_equal": is_told and _ends_as(run, expected, is_timed=False)}


def growth(folder: Path, updates: int) -> Iterator[dict[str, Any]]:
    """Memory and open files of one process after a tenth of its updates, and at its end."""
    run = folder / "long"
    options = f"--updates {updates} --batch-size 8 --micro-batch 4 --save-every {updates // 10}"
    running = start(["train", "textbook", *options.split(), "-q", "--out", str(run)], log=run.with_suffix(".log"))
    process, seen = Path(f"/proc/{running.pids[0]}"), []
    for part in (0.1, 0.95):
        while _num_lines(run, "update") < part * updates and running.alive():
            time.sleep(0.2)
        resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        seen.append((resident, len(list((process / "fd").iterdir()))))
    codes = running.wait()
    (first, files), (last, files_last) = seen
    is_flat = codes == [0] and last - first < 16 * 2**20 and files_last <= files
    yield {"updates": updates, "bytes": [first, last], "files": [files, files_last], "is_equal": is_flat}


def main() -> int:
    """0 if all that was asked for ended as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["kills", "faults", "ranks", "disk", "growth", "all"], default="all")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--parallel", choices=["ddp", "fsdp2", "both"], default="both", help="of the faults")
    parser.add_argument("--stage", choices=list(STAGES), action="append", help="of the faults; all if none is given")
    parser.add_argument("--seed", type=int, default=None, help="of the random moments")
    parser.add_argument("--write", action="store_true", help=f"add the results to {RESULTS.name}")
    chosen = parser.parse_args()
    seed = chosen.seed if chosen.seed is not None else time.time_ns() % 2**32
    preload()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for one in _all(chosen, Path(name), random.Random(seed)):
            found.append({"seed": seed} | one)
            print(json.dumps(found[-1]), flush=True)
            if chosen.write:
                before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
                RESULTS.write_text(json.dumps([*before, found[-1]], indent=1) + "\n")
    bad = [one for one in found if not one["is_equal"]]
    hits = sum(len(one.get("kills", ())) for one in found)
    print(f"{len(found) - len(bad)} of {len(found)} ended as they should, {hits} kills; moments from seed {seed}")
    return 1 if bad else 0


def _all(chosen: Any, folder: Path, moments: random.Random) -> Iterator[dict[str, Any]]:
    def is_asked(part: str) -> bool:
        return chosen.part in (part, "all")

    if is_asked("kills"):
        yield from kills(folder, chosen.kills, moments)
    for parallel in ("ddp", "fsdp2") if is_asked("faults") else ():
        if chosen.parallel in (parallel, "both"):
            yield from faults(folder, parallel, chosen.stage or list(STAGES))
    if is_asked("ranks"):
        yield from ranks(folder)
    if is_asked("disk"):
        yield from disk(folder, moments)
    if is_asked("growth"):
        yield from growth(folder, chosen.updates)


if __name__ == "__main__":
    sys.exit(main())
