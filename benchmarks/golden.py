"""Golden record: hashes of everything that some hundred small scenarios compute, to compare two trees bit by bit.

    python -m benchmarks.golden --write            # on the old tree
    python -m benchmarks.golden --check            # on the new tree: names each scenario and field that differs
    python -m benchmarks.golden --check --only "rows" "DDP, plain, 2 ranks"

The hashes depend on the CPU kernels of the machine and on the versions of the libraries. The record therefore compares
trees on one machine: write it again on the old tree before a restructuring starts. Scenarios use the public API only, so
that the same file runs against older and newer trees (`PYTHONPATH=other/src`). Each runs in a forked process of its own,
so that neither their order nor `--only` changes a result; one thread, CPU, fixed seeds. Memory figures and paths are left out.
"""

import argparse
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._dynamo  # optimizers load it at their first step: once here instead of in every process
import torch.distributed as dist
from torch import Tensor, nn

import anybatch
from benchmarks.golden_scenarios import SCENARIOS

RECORD = Path(__file__).parent.parent / "docs" / "benchmarks" / "golden.json"
HASHED = ("grads", "weights", "buffers", "rng", "collectives", "operations")
"""Fields that are stored as a hash; the others are short enough to be stored as they are."""
COLLECTIVES = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))]
MACHINE_PARTS = {r"(?<![\w.])/[\w.+-]+(/[\w.+-]+)+": "<path>", r"[\d.,]+ ?([KMGT]i?B|kB|bytes|B)\b": "<memory>"}
SECONDS = 120.0


class Seen:
    """Everything that one process of a scenario observed, field by field."""

    def __init__(self) -> None:
        self.fields: dict[str, list[str]] = defaultdict(list)

    def say(self, text: object) -> None:
        for pattern, stand_in in MACHINE_PARTS.items():
            text = re.sub(pattern, stand_in, str(text))
        self.fields["messages"].append(str(text))

    def refuse(self, call: Callable[[], Any]) -> None:
        """Call, and record the error that it raises; updates record their own."""
        try:
            call()
        except Exception as error:
            self.say(f"{type(error).__name__}: {error}")

    def tensors(self, model: nn.Module) -> None:
        parameters = list(model.named_parameters())
        self.fields["grads"] += [f"{name} {digest(parameter.grad)}" for name, parameter in parameters]
        self.fields["weights"] += [f"{name} {digest(parameter)}" for name, parameter in parameters]
        self.fields["buffers"] += [f"{name} {digest(buffer)}" for name, buffer in model.named_buffers()]

    def result(self, result: Any) -> None:
        self.fields["loss"].append(float(result.loss).hex())
        self.fields["units"].append(str(float(result.units)))
        told = ("micro_batches", "applied", "dropped", "retries", "lr", "noise_scale")
        rest = {name: getattr(result, name, None) for name in told}
        rest |= {name: digest(value) for name, value in result.metrics.items()}
        self.fields["results"].append(str(rest))
        if hasattr(result, "grad_norm"):
            self.fields["grad_norm"].append(float(result.grad_norm).hex())

    def random_states(self) -> None:
        numbers = [str(part) for part in numpy.random.get_state()]
        self.fields["rng"] += [digest(torch.get_rng_state()), str(random.getstate()), *numbers]

    def short(self) -> dict[str, Any]:
        """The fields as they are stored: a hash and the number of entries, or the entries."""
        hashed = {name: f"{len(found)}: {sha('|'.join(found))}" for name, found in self.fields.items()}
        return {name: hashed[name] if name in HASHED else found for name, found in self.fields.items() if found}


def sha(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:24]


def digest(tensor: Tensor | None) -> str:
    """Hash of dtype, shape and every bit; of a sharded tensor, those of this rank's shard."""
    if tensor is None:
        return "None"
    local = getattr(tensor, "to_local", lambda: tensor)().detach().cpu().contiguous()
    raw = local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return sha(f"{local.dtype} {tuple(local.shape)}".encode() + raw)


def watch_warnings(seen: Seen) -> None:
    """Record the warnings that anybatch issues, however often; those of torch and the frameworks depend on their version."""

    def show(message: Warning | str, *_: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") in ("warnings", "_py_warnings"):
            frame = frame.f_back
        if str(frame.f_globals.get("__name__")).startswith("anybatch"):
            seen.say(f"warning: {message}")

    warnings.simplefilter("always")
    warnings.showwarning = show  # type: ignore[assignment]


def watch_collectives(seen: Seen) -> None:
    """Record name and shapes of each call of torch.distributed, in order. DDP's reducer calls none: see `run_alone`."""

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            given = [*arguments, *options.values()]
            shapes = [tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in given]
            seen.fields["collectives"].append(f"{name}{shapes}")
            return function(*arguments, **options)

        return call

    for name in COLLECTIVES:
        if callable(function := getattr(dist, name)) and not isinstance(function, type):
            setattr(dist, name, watched(name, function))


def run_alone(run: Callable[[Seen], None], rank: int, ranks: int, folder: str, seed: int, pipe: Any) -> None:
    """Run a scenario in this process, as one of `ranks`, and send what was seen."""
    seen = Seen()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    logging.disable()
    torch.set_num_threads(1)
    os.chdir(folder)
    watch_warnings(seen)
    try:
        if ranks:
            dist.init_process_group("gloo", store=dist.FileStore("store", ranks), rank=rank, world_size=ranks)
            watch_collectives(seen)
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        with torch.profiler.profile(record_shapes=True) if ranks else warnings.catch_warnings() as profiler:
            run(seen)
        if ranks:  # what DDP's reducer sends from C++, by the operations of the process group
            sent = sorted((event.time_range.start, f"{event.name}{event.input_shapes}") for event in profiler.events())
            seen.fields["operations"] += [name for _, name in sent if name.startswith("c10d::")]
        seen.random_states()
    except BaseException:
        seen.fields["crash"] = traceback.format_exc().splitlines()[-6:]
    pipe.send(seen.short())
    pipe.close()
    os._exit(0)


def observe(name: str, seed: int = 0) -> dict[str, Any]:
    """Run a scenario in new processes; of several ranks, each field is a list with an entry per rank."""
    run, ranks = SCENARIOS[name]
    fork, told = multiprocessing.get_context("fork"), []
    with tempfile.TemporaryDirectory() as folder:
        ends = [fork.Pipe(duplex=False) for _ in range(ranks or 1)]
        jobs = [
            fork.Process(target=run_alone, args=(run, rank, ranks, folder, seed, end[1]))
            for rank, end in enumerate(ends)
        ]
        for job, (_, sending) in zip(jobs, ends, strict=True):
            job.start()
            sending.close()
        for receiving, _ in ends:
            try:
                told.append(receiving.recv() if receiving.poll(SECONDS) else {"crash": [f"no answer in {SECONDS} s"]})
            except EOFError:
                told.append({"crash": ["the process died"]})
        for job in jobs:
            job.join(5)
            job.kill()
    return told[0] if ranks < 2 else {key: [one.get(key) for one in told] for one in told for key in one}


def as_text(record: dict[str, Any]) -> str:
    """The record as JSON with a line per field."""
    lines = []
    for name, found in record.items():
        fields = ",\n".join(f"  {json.dumps(field)}: {json.dumps(value)}" for field, value in found.items())
        lines.append(f" {json.dumps(name)}: {{\n{fields}\n }}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def differences(stored: dict[str, Any], found: dict[str, Any]) -> Iterable[str]:
    """One line per field that differs."""
    for name in found:
        old = stored.get(name, {})
        for field in sorted({*old, *found[name]}):
            if old.get(field) != found[name].get(field):
                yield f"{name}: {field} differs\n    stored: {old.get(field)}\n    found:  {found[name].get(field)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="store a new record; with --only, those scenarios in it")
    what.add_argument(
        "--check", action="store_true", help="compare with the record: exit code 1 where something differs"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another record")
    given = parser.parse_args(arguments)
    if any(name.startswith(("Hugging Face", "integration")) for name in given.only):
        import accelerate  # noqa: F401
        import lightning  # noqa: F401
        import transformers  # noqa: F401
    gc.freeze()
    found = {name: observe(name, given.seed) for name in given.only}
    stored = json.loads(given.record.read_text()) if given.record.exists() else {}
    crashed = [name for name in found if "crash" in found[name]]
    for name in crashed:
        print(f"{name}: crashed: {found[name]['crash']}")
    if given.write:
        if not crashed:
            kept = stored if len(found) < len(SCENARIOS) else {}
            given.record.write_text(as_text(kept | found))
        print(f"{anybatch.__version__}, torch {torch.__version__}: {len(found)} scenarios")
        return 1 if crashed else 0
    lines = list(differences(stored, found))
    print(*lines, f"{len(found)} scenarios, {len(lines)} differences", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
