"""How this process was started: alone, or as a rank of torchrun. Knows nothing of torch until ranks are joined."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from anybatch.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One rank of a launch."""

    rank: int
    size: int
    local_rank: int
    """Its number on this machine: which GPU it takes."""
    name: str | None
    """The same for all ranks and after every restart of them; None where the launcher does not restart."""


def find_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """What torchrun has told this process; None: it was started alone.

    >>> find_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    Launch(rank=1, size=2, local_rank=1, name=None)
    """
    found = os.environ if environ is None else environ
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return None
    name = found.get("TORCHELASTIC_RUN_ID")
    if name == "none":  # what torchrun calls a launch that nobody named: the agent, our parent, tells it from others
        name = f"none-{os.getppid()}"
    return Launch(
        rank=int(found["RANK"]), size=int(found["WORLD_SIZE"]), local_rank=int(found.get("LOCAL_RANK", 0)), name=name
    )


def check_alone(command: str | None) -> None:
    """Raise if several ranks were started for a command that is for one process; all but rank 0 are silent."""
    launch = find_launch()
    if launch is not None and launch.size > 1:
        error = SettingsError(
            f"anybatch {command} works in one process, and torchrun has started {launch.size}. Start it without torchrun."
        )
        error.is_told = launch.rank > 0  # type: ignore[attr-defined]
        raise error


@contextmanager
def joined(launch: Launch, device: str) -> Iterator[Any]:
    """The process group of all ranks; on GPUs each rank's own is the current one from here on."""
    import torch
    import torch.distributed as dist

    if device.startswith("cuda:"):
        raise SettingsError(
            f"--device {device} with {launch.size} ranks: each takes the GPU of its own number. Give --device cuda, and "
            "choose among GPUs with CUDA_VISIBLE_DEVICES."
        )
    is_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if is_cuda:
        if launch.local_rank >= torch.cuda.device_count():
            raise SettingsError(
                f"rank {launch.rank} is number {launch.local_rank} (from 0) on a machine with {torch.cuda.device_count()} "
                "GPUs. Give torchrun --nproc-per-node no more than that, or use --device cpu."
            )
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    yield dist.group.WORLD
    # after an error the others may be gone, and saying goodbye would wait for them
    dist.destroy_process_group()
