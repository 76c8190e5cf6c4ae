"""Ranks that stay: a pool of processes in one gloo group, which run scenarios on demand.

A scenario is a function of a module. Every rank calls it with the same arguments and the same seed, and what it returned or
raised comes back by rank. The pool is forked when it is first asked for. Where a rank dies, hangs, or raises when others do
not, nobody knows what the group is left in: the pool is ended, and the next scenario gets a new one.
"""

import atexit
import gc
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.processes.server import server

PATIENCE = 600.0
"""Seconds for one scenario; the slowest takes a few on an idle machine."""
LAST_WORDS = 60.0
"""Seconds for the others to say what they know when one rank has died."""


class RankError(Exception):
    """A rank died, or did not answer."""


class Raised(str):
    """An exception that left a scenario: its type and message. `trace` is where it came from."""

    trace: str

    def __reduce__(self) -> Any:
        return _raised, (str(self), self.trace)


def _raised(text: str, trace: str) -> Raised:
    raised = Raised(text)
    raised.trace = trace
    return raised


class Pool:
    """So many ranks, which wait for scenarios."""

    def __init__(self, size: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes: list[ForkServerProcess] = []
        self.connections: list[Connection] = []
        for rank in range(size):
            ours, theirs = server().Pipe()
            process = server().Process(target=_serve, args=(theirs, rank, size, self.folder.name), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def run(self, request: bytes) -> list[Any]:
        """What each rank answers."""
        try:
            for connection in self.connections:
                connection.send_bytes(request)
        except OSError as error:
            raise RankError("a rank has died since the last scenario") from error
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < len(self.connections):
            waiting = [connection for connection in self.connections if connection not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = [self.connections.index(connection) for connection in waiting]
                raise RankError(f"no answer of ranks {ranks} within {PATIENCE:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answers[connection] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    rank = self.connections.index(connection)
                    self.processes[rank].join(LAST_WORDS)
                    told = [f"rank {self.connections.index(one)}: {answer}" for one, answer in answers.items()]
                    raise RankError(
                        f"rank {rank} died with code {self.processes[rank].exitcode}; {'; '.join(told) or 'nobody answered'}"
                    ) from None
        return [answers[connection] for connection in self.connections]

    def end(self) -> None:
        """Kill what runs."""
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self.folder.cleanup()


class Ranks:
    """Pools by size; a scenario that was run before is not run again."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}
        self.known: dict[tuple[int, bytes], list[Any]] = {}

    def outcomes(self, size: int, scenario: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """What `scenario` returned or `Raised`, by rank."""
        request = pickle.dumps((scenario, arguments, options))
        if (size, request) not in self.known:
            pool = self.pools.setdefault(size, None) or Pool(size)  # type: ignore[arg-type]
            self.pools[size] = pool
            try:
                told = pool.run(request)
            except BaseException:
                self._end(size)
                raise
            if len({isinstance(one, Raised) for one in told}) > 1:
                self._end(size)
            self.known[size, request] = told
        return self.known[size, request]

    def _end(self, size: int) -> None:
        self.pools.pop(size).end()

    def end(self) -> None:
        for size in list(self.pools):
            self._end(size)


@cache
def the_ranks() -> Ranks:
    """Of this process; they end with it."""
    ranks = Ranks()
    atexit.register(ranks.end)
    return ranks


def on_ranks(size: int, scenario: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """What `scenario` returned, by rank; an exception that left it fails the test that asked."""
    told = the_ranks().outcomes(size, scenario, *arguments, **options)
    for rank, one in enumerate(told):
        assert not isinstance(one, Raised), f"rank {rank} of {size} raised\n{one.trace}"
    return told


def raised_on_ranks(size: int, scenario: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """The type and message of what left `scenario` on each rank; one that returned fails the test that asked."""
    told = the_ranks().outcomes(size, scenario, *arguments, **options)
    for rank, one in enumerate(told):
        assert isinstance(one, Raised), f"rank {rank} of {size} raised nothing and returned {one!r}"
    return told


def _serve(connection: Connection, rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends the pool
    os.chdir(folder)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # pytest has gone
        answer = _answer(request)
        gc.collect()  # DDP's destructor waits for its group: let it find the others
        gc.freeze()  # what the scenario has imported: with a trainer, 0.5 s in every collection to come
        connection.send_bytes(pickle.dumps(answer))


def _answer(request: bytes) -> Any:
    import torch
    import torch.distributed as dist

    try:
        scenario, arguments, options = pickle.loads(request)
        random.seed(0)
        torch.manual_seed(0)
        return scenario(*arguments, **options)
    except Exception as error:
        return _raised(f"{type(error).__name__}: {error}", traceback.format_exc())
    finally:
        assert dist.is_initialized(), "a scenario may not end the group that it was given"
        torch.set_default_dtype(torch.float32)
