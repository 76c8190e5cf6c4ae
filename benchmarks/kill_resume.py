"""Kill a training run at random moments, resume it each time, and compare its end with that of an undisturbed run.

    python benchmarks/kill_resume.py --task digits --kills 20

Every process is the command line itself, forked from one that has loaded torch, so that most kills hit the training and
not its start-up; they are SIGKILL, which no program can notice. Weights, optimizer, scheduler and random states must be
equal bit for bit, and the losses of all updates as well.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes about itself
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "anybatch.app.cli.train",
    "anybatch.app.training.loop",
    "anybatch.app.training.tasks.digits",
)


def main() -> int:
    """0 if every run that was killed ended as the undisturbed one did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="textbook")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="of the random moments")
    parser.add_argument("--options", default="--save-every 3", help="further options of anybatch train")
    arguments = parser.parse_args()
    for module in PRELOADED:
        __import__(module)
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % 2**32
    with tempfile.TemporaryDirectory() as folder:
        return _run(Path(folder), arguments.task, arguments.options.split(), arguments.kills, random.Random(seed), seed)


def _run(folder: Path, task: str, options: list[str], kills: int, moments: random.Random, seed: int) -> int:
    began = time.monotonic()
    reference = folder / "undisturbed"
    if _wait(_start(["train", task, *options, "--out", str(reference), "-q"])) != 0:
        print("the undisturbed run failed")
        return 1
    length = time.monotonic() - began
    print(f"{task}: undisturbed run {length:.1f} s; the moments of the kills come from seed {seed}")
    expected = end_of(reference)
    done = num_runs = num_different = 0
    while done < kills:
        run = folder / f"killed-{num_runs}"
        num_runs += 1
        at: list[int] = []
        while not _is_finished(run):
            is_there = (run / "run.json").exists()
            arguments = ["train", "--resume", str(run)] if is_there else ["train", task, *options, "--out", str(run)]
            process = _start([*arguments, "-q"])
            # the last process of the last run is left alone
            if done < kills and _kill_after(process, moments.uniform(0.0, 0.6 * length)):
                done += 1
                at.append(num_updates(run))
            elif done >= kills and _wait(process) != 0:
                print("a resumed run failed")
                return 1
        is_equal = end_of(run) == expected
        num_different += not is_equal
        verdict = "equal bit for bit" if is_equal else "DIFFERENT"
        print(f"run {num_runs}: killed {len(at)} times, after updates {at}: its end is {verdict}")
    print(f"{task}: {done} kills in {num_runs} runs, {num_different} ended differently")
    return 1 if num_different else 0


def _start(arguments: list[str]) -> int:
    process = os.fork()
    if process == 0:
        from anybatch.app.cli.main import run

        code = 1
        try:
            code = run(arguments)
        finally:
            sys.stdout.flush()
            os._exit(code)
    return process


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _kill_after(process: int, seconds: float) -> bool:
    """True if the process was killed, False if it had ended by itself; a failure is raised."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            if status != 0:
                raise RuntimeError(f"a run ended by itself with code {os.waitstatus_to_exitcode(status)}")
            return False
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def _is_finished(run: Path) -> bool:
    from anybatch.app.records.run_folder import RunFolder

    return (run / "run.json").exists() and RunFolder(run).read_run().status == "finished"


def num_updates(run: Path) -> int:
    """How many updates its records tell of."""
    from anybatch.app.records.run_folder import RunFolder

    return sum(line["event"] == "update" for line in RunFolder(run).read_metrics())


def end_of(run: Path) -> bytes:
    """Everything that must be equal at the end, as bytes."""
    from anybatch.app.records.run_folder import RunFolder

    folder = RunFolder(run)
    parts = content_of(folder.checkpoints)
    lines = [line for line in folder.read_metrics() if line["event"] in ("update", "epoch")]
    losses = [{name: value for name, value in line.items() if name != "seconds"} for line in lines]
    return repr((_bits(parts), losses)).encode()


def content_of(checkpoints: Path) -> dict[str, Any]:
    """Read the newest checkpoint of a folder, whole."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from anybatch.app.training.checkpoints import checkpoints_in, read_tensors

    path = checkpoints_in(checkpoints)[0]
    shapes = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(held.size, dtype=held.properties.dtype) for name, held in sorted(shapes.items())}
    read_tensors(path, tensors)
    states = torch.load(path / "states.pt", weights_only=True)
    parts = {name: states[name] for name in ("optimizer", "scheduler", "scaler")}
    random = [torch.load(each, weights_only=True) for each in sorted(path.glob("rank-*.pt"))]
    return {"name": path.name, "tensors": tensors, "random": random, **parts}


def _bits(value: object) -> object:
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bits(item) for item in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
