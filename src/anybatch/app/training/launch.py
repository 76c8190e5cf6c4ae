"""How this process was started: alone, or as a rank of torchrun. Knows nothing of torch until ranks are joined."""

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

RANK_TIMEOUT = 300.0  # seconds that a rank waits for the others before it takes them for lost
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
"""Messages of collectives when another rank has gone, or does not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One rank of a launch."""

    rank: int
    size: int
    local_rank: int  # on this machine: which GPU it takes
    name: str | None  # the same for all ranks and after every restart of them; None where the launcher does not restart


def find_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Read what torchrun has told this process; None where the process was started alone.

    >>> find_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    Launch(rank=1, size=2, local_rank=1, name=None)
    """
    found = os.environ if environ is None else environ
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return None
    name = found.get("TORCHELASTIC_RUN_ID")
    if name == "none":  # nobody named the launch: the agent, our parent, tells it from others
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
def joined_ranks(launch: Launch, device: str, *, seconds: float = RANK_TIMEOUT) -> Iterator[Any]:
    """The process group of all ranks; on GPUs each rank's own is the current one from here on.

    A rank that waits `seconds` for another ends with an error: that one hangs, or is lost.
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
    gc.collect()  # a model that is still held by a cycle would wait for its group when it goes
    # after an error the others may be gone, and saying goodbye would wait for them
    dist.destroy_process_group()


def _takes_gpu(launch: Launch, device: str) -> bool:
    """True where this rank computes on a GPU, which is the current one from here on."""
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
    """True if a collective raised this because another rank has gone, or does not answer in time."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_RANK)


def agree_on_round(store: Any, rank: int, size: int, *, seconds: float = RANK_TIMEOUT) -> str:
    """A name that all ranks started together have in common, and those before a restart had not.

    torchrun of torch 2.13 hands restarted ranks the store of the ranks before them, which still has their addresses. A rank
    that starts before another reads that one's old address, and waits there for half an hour. So each rank leaves a word of its
    own, rank 0 answers with its own word and all words that it sees, and a rank takes the answer that has its word in it.
    """
    word, end = uuid4().hex, monotonic() + seconds
    store.set(f"anybatch/word/{rank}", word)

    def told(key: str) -> str:
        return store.get(f"anybatch/{key}").decode() if store.check([f"anybatch/{key}"]) else ""

    def wait(others: str) -> None:
        if monotonic() > end:
            raise ParallelError(
                f"rank {rank} of {size} waited {seconds:.0f} s for {others}. Look at what it said, or start all ranks anew."
            )
        sleep(0.01)

    if rank > 0:
        while word not in (answer := told("answer").split()):
            wait("rank 0")
        store.set(f"anybatch/taken/{rank}", answer[0])
        return answer[0]
    while missing := [other for other in range(1, size) if told(f"taken/{other}") != word]:
        store.set("anybatch/answer", " ".join([word, *(told(f"word/{other}") for other in range(1, size))]))
        wait(f"rank {missing[0]}")
    return word
