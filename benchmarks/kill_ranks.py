"""Kill ranks of a torchrun at random moments, and compare the end of the run with that of one that nobody killed.

    python -m benchmarks.kill_ranks --task textbook --ranks 2 --kills 10

One torchrun runs the command line with `--max-restarts`. Again and again a rank chosen at random gets SIGKILL, after a random
number of updates or, one time in five, while ranks are still starting. torchrun restarts all ranks, which go on from the last
checkpoint by themselves. At the end weights, optimizer, scheduler and random states of every rank must be equal bit for bit
to those of an undisturbed run on as many ranks, and the losses of all updates as well.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kill_resume import end_of, num_updates

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "kill_ranks.json"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}


@dataclass(frozen=True)
class Kill:
    """One SIGKILL."""

    rank: int
    update: int
    """The last update whose record was on the disk."""
    while_starting: bool


class Torchrun:
    """The command line on ranks, all of which torchrun starts again where one dies."""

    seconds_to_start = 3.0
    """Before its first update."""

    def __init__(self, arguments: Sequence[str], log: Path, ranks: int, restarts: int) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*torchrun, "--max-restarts", str(restarts), "-m", "anybatch", *arguments]
        # what torchrun and the ranks that lost another say of it is news only if the run fails
        with log.open("wb") as file:
            self.agent = subprocess.Popen(command, env=ENVIRONMENT, stderr=file)
        self.poll, self.wait = self.agent.poll, self.agent.wait

    def processes(self) -> dict[int, int]:
        return workers_of(self.agent.pid)


def main(words: Sequence[str] | None = None, start: Callable[..., Torchrun] = Torchrun) -> int:
    """0 if the run finished and its end is the undisturbed one's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="textbook")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="of the random moments")
    parser.add_argument("--options", default="--epochs 20 --save-every 3", help="further options of anybatch train")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args(words)
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % 2**32
    with tempfile.TemporaryDirectory() as folder:
        options = arguments.options.split()
        found = _run(Path(folder), start, arguments.task, options, arguments.ranks, arguments.kills, seed)
    print(f"{arguments.task} on {arguments.ranks} ranks: {len(found['kills'])} kills, its end is {found['end']}")
    if arguments.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["end"] == "equal bit for bit" and len(found["kills"]) == arguments.kills else 1


def _run(
    folder: Path, start: Callable[..., Torchrun], task: str, options: list[str], ranks: int, kills: int, seed: int
) -> dict[str, object]:
    moments = random.Random(seed)
    began = time.monotonic()

    def started(out: Path, restarts: int) -> Torchrun:
        return start(["train", task, *options, "-q", "--out", str(out)], _log_of(out), ranks, restarts)

    undisturbed = folder / "undisturbed"
    if started(undisturbed, 0).wait() != 0:
        raise RuntimeError(f"the undisturbed run failed: {_log_of(undisturbed).read_text()}")
    print(
        f"undisturbed run: {time.monotonic() - began:.1f} s; the moments of the kills come from seed {seed}", flush=True
    )
    run = folder / "killed"
    updates = num_updates(undisturbed)
    agent = started(run, kills)
    done: list[Kill] = []
    gone: set[int] = set()
    while len(done) < kills and agent.poll() is None:
        kill = _kill_one(agent, run, ranks, moments, gone, most=max(1, updates // (2 * kills)))
        if kill is not None:
            done.append(kill)
            print(f"[{len(done)}/{kills}] rank {kill.rank} killed after update {kill.update} of {updates}", flush=True)
    if (code := agent.wait()) != 0:
        raise RuntimeError(f"torchrun ended with code {code} after {len(done)} kills: {_log_of(run).read_text()}")
    is_equal = end_of(run) == end_of(undisturbed)
    return {
        "task": task,
        "options": " ".join(options),
        "ranks": ranks,
        "seed": seed,
        "updates": updates,
        "kills": [asdict(kill) for kill in done],
        "end": "equal bit for bit" if is_equal else "DIFFERENT",
    }


def _log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def _kill_one(agent: Torchrun, run: Path, ranks: int, moments: random.Random, gone: set[int], most: int) -> Kill | None:
    """Kill one of the ranks that torchrun has started since the last kill; None where the run ended first."""
    while len(workers := {rank: pid for rank, pid in agent.processes().items() if pid not in gone}) < ranks:
        if agent.poll() is not None:
            return None
        time.sleep(0.01)
    while_starting = moments.random() < 0.2
    if while_starting:
        time.sleep(moments.uniform(0.0, agent.seconds_to_start))
    else:
        target = _num_done(run) + moments.randint(1, most)
        while _num_done(run) < target and agent.poll() is None:
            time.sleep(0.002)
        time.sleep(moments.uniform(0.0, 0.03))
    rank = moments.randrange(ranks)
    try:
        os.kill(workers[rank], signal.SIGKILL)
    except ProcessLookupError:
        return None
    gone.update(workers.values())
    return Kill(rank=rank, update=_num_done(run), while_starting=while_starting)


def _num_done(run: Path) -> int:
    return num_updates(run) if (run / "metrics.jsonl").exists() else 0


def workers_of(agent: int) -> dict[int, int]:
    """The process of each rank among the children of this torchrun."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{agent}/task").glob("*/children"):
        try:
            for pid in task.read_text().split():
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(value[5:]): int(pid) for value in variables if value.startswith(b"RANK=")}
        except OSError:
            continue  # it ended while we looked
    return found


if __name__ == "__main__":
    sys.exit(main())
