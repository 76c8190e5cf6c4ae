"""Checkpoints at update boundaries: written whole or not at all, checked when read, on any number of ranks.

A checkpoint holds the model, the optimizer, the scheduler, the scaler, the random states of each rank and the position in the
data. It is a folder, see `checkpoint_files`: saved by any number of ranks, DDP, FSDP2 or one process, and resumed by any other.
"""

import copy
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

import anybatch.app.training.checkpoints.checkpoint_files as files
from anybatch.app.records.run_folder import sync_folder
from anybatch.app.training.checkpoints.checkpoint_files import (
    CheckpointContents,
    TensorShape,
    random_states,
    read_tensors,
    restore_random_states,
    seed_rank,
)
from anybatch.app.training.launch.spreading import from_first_rank
from anybatch.core import ONE_PROCESS, Ranks, Update, is_sharded
from anybatch.errors import CheckpointError, first_line
from anybatch.parallel import unwrapped

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


class OtherUpdateError(CheckpointError):
    """A checkpoint of another model, optimizer or run: no older one of its folder would fit either."""


def states_of(update: Update) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of an update, which many ranks may share, by name; and all its other states as plain values."""
    model, optimizer = unwrapped(update.model).state_dict(), update.optimizer.state_dict()
    tensors = {f"model.{name}": value for name, value in model.items() if isinstance(value, Tensor)} | _beside(update)
    moments: dict[str, tuple[Any, str]] = {}
    rest: dict[Any, dict[str, Any]] = {}
    for key, state in optimizer["state"].items():
        rest[key] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                moments[f"optimizer.{key}.{name}"] = (key, name)
                tensors[f"optimizer.{key}.{name}"] = value
            else:
                rest[key][name] = value
    return tensors, {
        "noise": None if update.noise is None else update.noise.state_dict(),
        "model": {name: value for name, value in model.items() if not isinstance(value, Tensor)},
        "optimizer": optimizer | {"state": rest},
        "moments": moments,
        "optimizer_type": type(update.optimizer).__name__,
        "scheduler": None if update.scheduler is None else update.scheduler.state_dict(),
        "scaler": None if update.scaler is None else update.scaler.state_dict(),
        "split": split.state_dict() if hasattr(split := update.accumulator.split, "state_dict") else None,
    }


def _beside(update: Update) -> dict[str, Tensor]:
    """Parameters that the optimizer steps and the model does not have, by their place in it; and a coupled loss's buffers."""
    own = set(unwrapped(update.model).parameters())
    stepped = [parameter for group in update.optimizer.param_groups for parameter in group["params"]]
    found = {f"beside.{place}": held.detach() for place, held in enumerate(stepped) if held not in own}
    loss = update.accumulator.objective.loss
    buffers = loss.named_buffers() if isinstance(loss, nn.Module) else ()
    return found | {f"beside.loss.{name}": held for name, held in buffers}


def optimizer_state(states: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The optimizer's state as its `state_dict` was."""
    state: dict[Any, dict[str, Any]] = {key: dict(values) for key, values in states["optimizer"]["state"].items()}
    for full, (key, name) in states["moments"].items():
        state[key][name] = tensors[full]
    joined_ranks: dict[str, Any] = states["optimizer"] | {"state": state}
    return joined_ranks


def check_fits(path: Path, states: Mapping[str, Any], shapes: Mapping[str, TensorShape], update: Update) -> None:
    """Raise before anything is changed."""
    saved: dict[str, str] = {
        name.removeprefix("model."): str(shape) for name, shape in shapes.items() if name.startswith("model.")
    }
    saved |= {name: type(value).__name__ for name, value in states["model"].items()}
    there = {name: _described(value) for name, value in unwrapped(update.model).state_dict().items()}
    if saved != there:
        names = sorted(name for name in saved.keys() | there.keys() if saved.get(name) != there.get(name))
        name = names[0]
        raise OtherUpdateError(
            f"{path} is of another model: {name!r} is {saved.get(name, 'missing')} in the checkpoint and "
            f"{there.get(name, 'missing')} in the model ({len(names)} differ). Resume with the task that saved it."
        )
    saved = {name: str(shape) for name, shape in shapes.items() if name.startswith("beside.")}
    there = {name: _described(value) for name, value in _beside(update).items()}
    if saved != there:
        name = min(name for name in saved.keys() | there.keys() if saved.get(name) != there.get(name))
        place = name.removeprefix("beside.")
        raise OtherUpdateError(
            f"{path} has other parameters beside the model, such as a loss's: {place!r} of the optimizer or the loss is "
            f"{saved.get(name, 'missing')} in the checkpoint and {there.get(name, 'missing')} in this run. Give the optimizer "
            "the parameters that it had when it was saved."
        )
    kind = type(update.optimizer).__name__
    if states["optimizer_type"] != kind:
        raise OtherUpdateError(
            f"{path} was saved with {states['optimizer_type']}, this run has {kind}. Resume with the same optimizer."
        )
    for name, part in (("scheduler", update.scheduler), ("scaler", update.scaler)):
        if (states[name] is None) != (part is None):
            has, wants = ("no", "one") if states[name] is None else ("a", "none")
            raise OtherUpdateError(
                f"{path} has {has} {name}, this run has {wants}. Resume with the settings that it was saved with."
            )


def _described(value: object) -> str:
    return str(TensorShape(value.shape, value.dtype)) if isinstance(value, Tensor) else type(value).__name__


def load_states(path: Path, states: Mapping[str, Any], shapes: Mapping[str, TensorShape], update: Update) -> None:
    parameters = [parameter for group in update.optimizer.param_groups for parameter in group["params"]]
    moments = {
        name: _empty_for(shapes[name], parameters[key] if isinstance(key, int) and key < len(parameters) else None)
        for name, (key, _) in states["moments"].items()
    }
    read_tensors(path, moments)
    try:
        update.optimizer.load_state_dict(optimizer_state(states, moments))
    except ValueError as error:
        raise OtherUpdateError(
            f"{path} does not fit this optimizer: {first_line(error)}. Resume with the optimizer that it was saved with."
        ) from error
    model = unwrapped(update.model)
    weights = model.state_dict()
    read_tensors(path, {f"model.{name}": value for name, value in weights.items() if isinstance(value, Tensor)})
    model.load_state_dict(weights | states["model"])
    read_tensors(path, _beside(update))
    if update.scheduler is not None:
        update.scheduler.load_state_dict(states["scheduler"])
    if update.scaler is not None:
        update.scaler.load_state_dict(states["scaler"])
    if update.noise is not None:
        update.noise.load_state_dict(states.get("noise"))
    if states.get("split") is not None and hasattr(split := update.accumulator.split, "load_state_dict"):
        split.load_state_dict(states["split"])  # what was learnt of costs: the cut goes on as it was


@contextmanager
def put_back_after_errors(update: Update) -> Iterator[None]:
    """The block for `load_states`: where anything raises in it, the update is as it was before."""
    optimizer, model = update.optimizer, unwrapped(update.model)
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)} | _beside(update)
    tensors = [(value, value.detach().clone()) for value in held.values()]
    steps, groups = optimizer.state, optimizer.param_groups  # loading makes new ones
    stateful: list[Any] = [update.scheduler, update.scaler, update.accumulator.split]
    parts = [part for part in stateful if hasattr(part, "load_state_dict")]
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for value, before in tensors:
                value.copy_(before)
        optimizer.state, optimizer.param_groups = steps, groups
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        raise


def _empty_for(shape: TensorShape, parameter: Tensor | None) -> Tensor:
    """A tensor to read into: sharded as its parameter is, if it is of the parameter's size."""
    if parameter is not None and is_sharded(parameter) and parameter.shape == shape.size:
        return torch.empty_like(parameter, dtype=shape.dtype, requires_grad=False)
    return torch.empty(shape.size, dtype=shape.dtype)
