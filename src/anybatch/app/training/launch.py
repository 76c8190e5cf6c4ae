"""Find out whether torchrun started this process, and join its ranks. Does not import torch before that."""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from anybatch.errors import ParallelError, SettingsError

RANK_TIMEOUT = 300.0  # seconds that a rank waits for the others
LOST_RANK = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "wait timeout",
    "NCCL error",
    "NCCL communicator was aborted",
)
"""Messages of collectives if another rank has gone or does not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    rank: int
    size: int
    local_rank: int  # number on this machine, and of its GPU
    name: str | None  # the same on all ranks and after every restart; None if the launcher does not restart


def find_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Read torchrun's environment variables; return None for a process started alone.

    >>> find_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    Launch(rank=1, size=2, local_rank=1, name=None)
    """
    found = os.environ if environ is None else environ
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return None
    name = found.get("TORCHELASTIC_RUN_ID")
    if name == "none":  # torchrun's default; its process, our parent, is unique
        name = f"none-{os.getppid()}"
    return Launch(
        rank=int(found["RANK"]), size=int(found["WORLD_SIZE"]), local_rank=int(found.get("LOCAL_RANK", 0)), name=name
    )


def check_alone(command: str | None) -> None:
    """Raise if several ranks were started for a command that runs in one process. Only rank 0 prints the error."""
    launch = find_launch()
    if launch is not None and launch.size > 1:
        error = SettingsError(
            f"anybatch {command} works in one process, and torchrun has started {launch.size}. Start it without torchrun."
        )
        error.is_told = launch.rank > 0  # type: ignore[attr-defined]
        raise error


@contextmanager
def joined_ranks(launch: Launch, device: str, *, seconds: float = RANK_TIMEOUT) -> Iterator[Any]:
    """Join the process group of all ranks, and make each rank's GPU the current one.

    A rank that waits `seconds` for another raises.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    backend = "cpu:gloo,cuda:nccl" if _takes_gpu(launch, device) else "gloo"
    timeout = timedelta(seconds=seconds)
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
        fresh = PrefixStore(agree_on_round(store, launch.rank, launch.size, seconds=seconds), store)
        dist.init_process_group(backend, store=fresh, rank=launch.rank, world_size=launch.size, timeout=timeout)
        yield dist.group.WORLD
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise ParallelError(
            f"rank {launch.rank} has lost another rank, which says itself why, unless it was killed or hangs: each waits "
            f"{seconds:g} s for the others (--rank-timeout). With torchrun --max-restarts N all ranks start again from the "
            "last checkpoint."
        ) from error
    gc.collect()  # a model in a reference cycle would wait for its group when it is freed
    # not after an error: the others may be gone, and this would wait for them
    dist.destroy_process_group()


def _takes_gpu(launch: Launch, device: str) -> bool:
    """Return True if this rank computes on a GPU, and make it the current one."""
    import torch

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
    return is_cuda


def is_lost_rank(error: BaseException) -> bool:
    """Return True if a collective raised this because another rank has gone or does not answer in time."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_RANK)


def agree_on_round(store: Any, rank: int, size: int, *, seconds: float = RANK_TIMEOUT) -> str:
    """Return a name that all ranks of this start share, and that no earlier start had.

    torchrun of torch 2.13 hands restarted ranks the old store, which still has the addresses of the ranks before them. A rank
    that starts early would read an old address and wait there for half an hour. So each rank stores a random word; rank 0
    answers with its own word and all words that it sees; a rank accepts an answer that contains its word.
    """
    word, end = uuid4().hex, monotonic() + seconds
    store.set(f"anybatch/word/{rank}", word)

    def stored(key: str) -> str:
        return store.get(f"anybatch/{key}").decode() if store.check([f"anybatch/{key}"]) else ""

    def wait(others: str) -> None:
        if monotonic() > end:
            raise ParallelError(
                f"rank {rank} of {size} waited {seconds:.0f} s for {others}. Look at what it said, or start all ranks anew."
            )
        sleep(0.01)

    if rank > 0:
        while word not in (answer := stored("answer").split()):
            wait("rank 0")
        store.set(f"anybatch/taken/{rank}", answer[0])
        return answer[0]
    while missing := [other for other in range(1, size) if stored(f"taken/{other}") != word]:
        store.set("anybatch/answer", " ".join([word, *(stored(f"word/{other}") for other in range(1, size))]))
        wait(f"rank {missing[0]}")
    return word
