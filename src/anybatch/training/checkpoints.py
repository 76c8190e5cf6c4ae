"""Checkpoints at update boundaries: written whole or not at all, checked when read.

A checkpoint holds the model, the optimizer, the scheduler, the scaler, all random states and the position in the data. It
is a file of `torch.save` and read with `weights_only=True`: reading one runs no code from it.
"""

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anybatch.errors import CheckpointError
from anybatch.training.randomness import random_states, restore_random_states
from anybatch.update import Update

FORMAT = 1
_NAME = re.compile(r"update-(\d+)\.pt")


class Positioned(Protocol):
    """A loader that knows where it is, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What was read, beside what was put back into the update."""

    path: Path
    number: int
    """Updates done when it was saved."""
    progress: Mapping[str, Any]
    """What `save` was given as `progress`."""
    loader_state: dict[str, Any] | None
    passed_over: tuple[str, ...] = field(default=())
    """Newer files that could not be read, and why."""


def save(
    folder: Path | str,
    update: Update,
    *,
    number: int,
    loader: Positioned | None = None,
    progress: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write `update-<number>.pt` into `folder`, then delete all but the `keep` newest.

    Call it between two updates; `number` is how many are done, `progress` plain values of your own. The file appears under
    its name when it is complete and on the disk: a kill at any moment leaves the older checkpoints as they were.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "anybatch": "checkpoint",
        "format": FORMAT,
        "number": number,
        "model": update.model.state_dict(),
        "optimizer": update.optimizer.state_dict(),
        "optimizer_type": type(update.optimizer).__name__,
        "scheduler": None if update.scheduler is None else update.scheduler.state_dict(),
        "scaler": None if update.scaler is None else update.scaler.state_dict(),
        "random": random_states(),
        "loader": None if loader is None else loader.state_dict(),
        "progress": dict(progress or {}),
    }
    path = folder / f"update-{number:08d}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}"
    try:
        _write(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(folder)
    for old in checkpoints_in(folder)[max(keep, 1) :]:
        old.unlink(missing_ok=True)
    return path


def resume(path: Path | str, update: Update, *, loader: Positioned | None = None) -> Resumed | None:
    """Put a checkpoint back into `update`, into all random states, and into `loader` if one is given.

    `path` is a checkpoint, or a folder of them: then the newest that can be read is used, and None is returned where there
    is none at all. A checkpoint of another model or optimizer raises, and changes nothing.
    """
    found = read(Path(path))
    if found is None:
        return None
    resumed, content = found
    _check_fits(resumed.path, content, update)
    _load(resumed.path, content, update)
    if loader is not None and resumed.loader_state is not None:
        loader.load_state_dict(resumed.loader_state)
    restore_random_states(content["random"])
    return resumed


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder by name, newest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def read(path: Path) -> tuple[Resumed, dict[str, Any]] | None:
    """The content of a checkpoint, or of the newest good one of a folder; None where the folder has none."""
    paths = checkpoints_in(path) if not path.is_file() else [path]
    passed_over: list[str] = []
    for candidate in paths:
        try:
            content = _read_one(candidate)
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            passed_over.append(str(error))
            continue
        resumed = Resumed(
            path=candidate,
            number=content["number"],
            progress=content["progress"],
            loader_state=content["loader"],
            passed_over=tuple(passed_over),
        )
        return resumed, content
    if passed_over:
        raise CheckpointError(f"none of the {len(paths)} checkpoints in {path} can be read: {'; '.join(passed_over)}")
    return None


def _write(path: Path, content: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        # the tensors are mapped, not read: this looks at the rest, before a checkpoint that nobody can load gets its name
        torch.load(path, weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"a checkpoint with these contents could be written but not read back: {_first_line(error)}. Keep to tensors "
            "and plain values in the states of the scheduler, the optimizer, the loader and in progress=."
        ) from error


def _read_one(path: Path) -> dict[str, Any]:
    advice = "Give a checkpoint that anybatch saved, or its folder to use the newest good one."
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.load does not check the sums that the file carries: one flipped bit goes unseen
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: {damaged} does not have its checksum. {advice}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is no whole checkpoint: {_first_line(error)}. {advice}"
        ) from error
    if not isinstance(content, dict) or content.get("anybatch") != "checkpoint":
        raise CheckpointError(f"{path} holds a {type(content).__name__} that anybatch did not save. {advice}")
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}; this version of anybatch reads format {FORMAT}. Resume it with the "
            "version that saved it."
        )
    return content


def _check_fits(path: Path, content: dict[str, Any], update: Update) -> None:
    """Raise before anything is changed."""
    saved, there = _shapes(content["model"]), _shapes(update.model.state_dict())
    if saved != there:
        names = sorted(name for name in saved.keys() | there.keys() if saved.get(name) != there.get(name))
        name = names[0]
        raise CheckpointError(
            f"{path} is of another model: {name!r} is {saved.get(name, 'missing')} in the checkpoint and "
            f"{there.get(name, 'missing')} in the model ({len(names)} differ). Resume with the task that saved it."
        )
    kind = type(update.optimizer).__name__
    if content["optimizer_type"] != kind:
        raise CheckpointError(
            f"{path} was saved with {content['optimizer_type']}, this run has {kind}. Resume with the same optimizer."
        )
    for name, part in (("scheduler", update.scheduler), ("scaler", update.scaler)):
        if (content[name] is None) != (part is None):
            has, wants = ("no", "one") if content[name] is None else ("a", "none")
            raise CheckpointError(
                f"{path} has {has} {name}, this run has {wants}. Resume with the settings that it was saved with."
            )


def _load(path: Path, content: dict[str, Any], update: Update) -> None:
    try:
        update.optimizer.load_state_dict(content["optimizer"])
    except ValueError as error:
        raise CheckpointError(
            f"{path} does not fit this optimizer: {_first_line(error)}. Resume with the optimizer that it was saved with."
        ) from error
    update.model.load_state_dict(content["model"])
    if update.scheduler is not None:
        update.scheduler.load_state_dict(content["scheduler"])
    if update.scaler is not None:
        update.scaler.load_state_dict(content["scaler"])


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in state.items()
    }


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
