"""Checkpoints at update boundaries: written whole or not at all, checked when read, on any number of ranks.

A checkpoint holds the model, the optimizer, the scheduler, the scaler, the random states of each rank and the position in the
data. It is a folder, see `checkpoint_files`: saved by any number of ranks, DDP, FSDP2 or one process, and resumed by any other.
"""

import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import anybatch.training.checkpoints.checkpoint_files as files
from anybatch.errors import CheckpointError, first_line
from anybatch.parallel import ONE_PROCESS, Ranks
from anybatch.records import sync_folder
from anybatch.training.checkpoints.checkpoint_files import CheckpointContents
from anybatch.training.checkpoints.random_states import random_states, restore_random_states, seed_rank
from anybatch.training.checkpoints.update_states import (
    OtherUpdateError,
    check_fits,
    load_states,
    optimizer_state,
    put_back_after_errors,
    states_of,
)
from anybatch.training.launch import from_first_rank
from anybatch.update import Update

_NAME = re.compile(r"update-(\d+)(-replaced)?")
_OLD_NAME = re.compile(r"update-\d+\.pt")
_TEMPORARY = re.compile(r"\.update-\d+(?:-replaced)?(?:\.(.+)\.(\d+))?")
"""A folder that is being filled or deleted: on which host, by which process; older versions of anybatch did not say."""
T = TypeVar("T")


class PositionedLoader(Protocol):
    """A loader that knows where it is, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `resume` has read and not put back into the update."""

    path: Path
    number: int
    """Updates done when it was saved."""
    ranks: int
    """How many ranks saved it."""
    progress: Mapping[str, Any]
    """What `save` was given as `progress`."""
    loader_state: dict[str, Any] | None
    passed_over: tuple[str, ...] = field(default=())
    """Why each newer checkpoint could not be read."""


def save(
    folder: Path | str,
    update: Update,
    *,
    number: int,
    loader: PositionedLoader | None = None,
    progress: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write the checkpoint `update-<number>` into `folder`, then delete all but the `keep` newest.

    Call it between two updates, on every rank; `number` is how many are done, `progress` plain values of your own. The loader's
    state and `progress` are those of rank 0. The checkpoint appears under its name when it is complete and on the disk: a kill
    at any moment leaves the older ones as they were.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise CheckpointError(f"number={number!r}: expected how many updates are done, a whole number, 0 or more.")
    ranks = Ranks.of(update.model)
    folder = Path(folder)
    path = folder / f"update-{number:08d}"
    temporary = from_first_rank(lambda: _make_temporary(path), ranks)
    tensors, states = states_of(update)
    states |= {"loader": None if loader is None else loader.state_dict(), "progress": dict(progress or {})}
    try:
        files.write(temporary, tensors, number=number, states=states, random=random_states(), ranks=ranks)
        from_first_rank(lambda: _put_in_place(temporary, path, keep), ranks)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return path


def resume(path: Path | str, update: Update, *, loader: PositionedLoader | None = None) -> Resumed | None:
    """Put a checkpoint back into `update`, into all random states, and into `loader` if one is given; on every rank.

    `path` is a checkpoint, or a folder of them: then the newest that can be read is used, and None is returned where there
    is none at all. A checkpoint of another model or optimizer raises. Whatever raises here changes nothing. On as many ranks as
    saved it, each gets its own random states back; on another number rank 0 does, and the others are seeded from them.
    """
    ranks = Ranks.of(update.model)
    return _newest(Path(path), ranks, lambda found, states: _take(found, states, update, loader, ranks))


def _take(
    found: Resumed, states: dict[str, Any], update: Update, loader: PositionedLoader | None, ranks: Ranks
) -> Resumed:
    shapes = files.read_shapes(found.path)
    check_fits(found.path, states, shapes, update)
    random = random_states()
    try:
        with put_back_after_errors(update):
            load_states(found.path, states, shapes, update)
            is_same = found.ranks == ranks.size
            restore_random_states(files.read_values(found.path / f"rank-{ranks.rank if is_same else 0}.pt"))
            if ranks.rank and not is_same:
                seed_rank(ranks.rank)
            if loader is not None and found.loader_state is not None:
                loader.load_state_dict(found.loader_state)
    except BaseException:
        restore_random_states(random)
        raise
    return found


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder by name, newest first."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))]


def read(path: Path) -> tuple[Resumed, dict[str, Any]] | None:
    """All of a checkpoint, or of the newest good one of a folder, whole and in this process; None where the folder has none."""

    def take(found: Resumed, states: dict[str, Any]) -> tuple[Resumed, dict[str, Any]]:
        shapes = files.read_shapes(found.path)
        tensors = {name: torch.empty(shape.size, dtype=shape.dtype) for name, shape in shapes.items()}
        files.read_tensors(found.path, tensors)
        model = {name.removeprefix("model."): held for name, held in tensors.items() if name.startswith("model.")}
        return found, states | {
            "number": found.number,
            "model": model | states["model"],
            "optimizer": optimizer_state(states, tensors),
            "random": [files.read_values(found.path / f"rank-{rank}.pt") for rank in range(found.ranks)],
        }

    return _newest(path, ONE_PROCESS, take)


def _newest(path: Path, ranks: Ranks, take: Callable[[Resumed, dict[str, Any]], T]) -> T | None:
    """What `take` makes of the newest checkpoint that every rank can read; None where there is none."""
    paths = from_first_rank(lambda: _candidates(path), ranks)
    passed_over: list[str] = []
    for candidate in paths:
        try:
            contents: CheckpointContents = from_first_rank(lambda: files.read_contents(candidate), ranks)  # noqa: B023
            files.check(candidate, contents, ranks)
            return _on_every_rank(lambda: take(*_opened(candidate, contents, passed_over)), candidate, ranks)  # noqa: B023
        except OtherUpdateError:
            raise
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            passed_over.append(str(error))
    if passed_over:
        raise CheckpointError(f"none of the {len(paths)} checkpoints in {path} can be read: {'; '.join(passed_over)}")
    return None


def _opened(path: Path, contents: CheckpointContents, passed_over: list[str]) -> tuple[Resumed, dict[str, Any]]:
    states = files.read_values(path / "states.pt")
    found = Resumed(
        path=path,
        number=contents.number,
        ranks=contents.ranks,
        progress=states["progress"],
        loader_state=states["loader"],
        passed_over=tuple(passed_over),
    )
    return found, states


def _on_every_rank(act: Callable[[], T], path: Path, ranks: Ranks) -> T:
    """What `act` returns; an error on every rank where it raised on one."""
    done: list[T] = []
    problem: CheckpointError | None = None
    try:
        done.append(act())
    except CheckpointError as error:
        problem = error
    except Exception as error:
        problem = CheckpointError(f"{path} cannot be read: {first_line(error)}. {files.ADVICE}")
        problem.__cause__ = error
    told = [one for one in ranks.gather_objects(problem) if one is not None]
    if told:
        raise problem or told[0]
    return done[0]


def _candidates(path: Path) -> list[Path]:
    if path.is_file() or (path / files.CONTENTS).exists():
        return [path]
    found = checkpoints_in(path)
    if not found and path.is_dir():
        return sorted((old for old in path.iterdir() if _OLD_NAME.fullmatch(old.name)), reverse=True)
    return found


def _make_temporary(path: Path) -> Path:
    """An empty folder of this process, to fill before it becomes `path`; those that killed processes left are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".update-*"):
        if _is_left_over(left.name):
            shutil.rmtree(left, ignore_errors=True)
    temporary = _temporary_of(path)
    temporary.mkdir()
    return temporary


def _temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def _is_left_over(name: str) -> bool:
    """True of what this process left, or one that has ended on this host; what others fill is left alone."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or match[1] not in (None, socket.gethostname()):
        return False
    if match[2] is None:
        return True
    try:
        os.kill(int(match[2]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return int(match[2]) == os.getpid()


def _put_in_place(temporary: Path, path: Path, keep: int) -> None:
    sync_folder(temporary)
    if path.exists():
        path.rename(path.with_name(f"{path.name}-replaced"))  # still found, and still whole
    temporary.rename(path)
    sync_folder(path.parent)
    found = checkpoints_in(path.parent)
    replaced = [old for old in found if old.name.endswith("-replaced")]
    for old in replaced + [old for old in found if old not in replaced][max(keep, 1) :]:
        gone = _temporary_of(old)  # half a folder must not look like a checkpoint
        old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
