"""Running claims on several ranks: one spawn, many scenarios, each leaving numbers behind for the tests to look at."""

import gc
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

Scenario = Callable[[], Any]
Outcomes = Callable[[str], list[Any]]
"""What a scenario left, by rank."""


def largest(told: list[Any], key: str) -> float:
    """The largest over ranks; a scenario that raised is shown instead."""
    assert not isinstance(told[0], str), told
    return max(abs(float(rank[key])) for rank in told)


def outcomes(scenarios: Mapping[str, Scenario], size: int) -> dict[str, list[Any]]:
    """What each scenario returned, by rank; an exception that left one is returned in its place, as text."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            multiprocessing.spawn(_rank, (size, folder, dict(scenarios)), nprocs=size)
        finally:
            os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)
        every = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]
    return {name: [told[name] for told in every] for name in scenarios}


def _rank(rank: int, size: int, folder: str, scenarios: dict[str, Scenario]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=180))
    told: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        torch.manual_seed(0)
        try:
            told[name] = scenario()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    torch.save(told, Path(folder) / f"{rank}.pt")
    gc.collect()  # DDP's destructor waits for its group, for ever where that is gone
    dist.barrier()
    dist.destroy_process_group()
