"""Checkpoints at update boundaries: written whole or not at all, checked when read, on any number of ranks.

A checkpoint is a folder that `torch.distributed.checkpoint` fills. Any number of ranks (one process, DDP, FSDP2) can save it,
and any other number can resume it.

    .metadata, __<rank>_0.distcp   tensors of model and optimizer; each rank writes its part
    rank-<rank>.pt                 random states of one rank
    states.pt                      everything else, as plain values: scheduler, scaler, position in the data
    checkpoint.json                number, ranks, size and checksum of each file; written last

Reading runs no code from the files: they are loaded with `weights_only=True`, and `.metadata` with an allow-list of classes.
"""

import copy
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import socket
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anybatch.app.records.run_folder import sync_folder, write_synced
from anybatch.app.training.ranks import from_first_rank, seed_rank
from anybatch.core import OuterRandom, Ranks, Update, get_layout, is_sharded, outer_random
from anybatch.errors import CheckpointError, first_line
from anybatch.parallel import unwrapped

FORMAT = 2
CONTENTS = "checkpoint.json"
ADVICE = "Give a checkpoint that anybatch saved, or its folder to use the newest good one."
_NAME = re.compile(r"update-(\d+)(-replaced)?")
_OLD_NAME = re.compile(r"update-\d+\.pt")
_TEMPORARY = re.compile(r"\.update-\d+(?:-replaced)?(?:\.(.+)\.(\d+))?")
"""A folder that is being filled or deleted, with the host and the process that does so; anybatch 0.1 named neither."""

T = TypeVar("T")


class OtherUpdateError(CheckpointError):
    """A checkpoint of another model, optimizer or run. Older checkpoints of its folder would not match either."""


class PositionedLoader(Protocol):
    """A loader that knows its position, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint that `resume` restored."""

    path: Path
    """Folder of the checkpoint."""
    number: int
    """Number of updates done when it was saved."""
    ranks: int
    """Number of ranks that saved it."""
    progress: Mapping[str, Any]
    """The `progress` given to `save`."""
    loader_state: dict[str, Any] | None
    """The `state_dict` of the loader given to `save`."""
    passed_over: tuple[str, ...] = ()
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

    Call it between two updates, on every rank. It stores the model, the optimizer, the scheduler, the scaler, what the split
    has learnt, and all random states. A checkpoint gets its name once it is complete and on disk: a kill at any moment leaves
    the older ones as they were.

    Args:
        folder: Folder of the run's checkpoints; created if it does not exist.
        update: The update to store.
        number: Number of updates done so far.
        loader: Data loader with `state_dict()`; rank 0's position is stored.
        progress: Your own plain values; those of rank 0 are stored.
        keep: Number of checkpoints to keep, this one included.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: If `number` is not a count, a file cannot be written, or a state holds more than plain values.

    >>> import tempfile, torch
    >>> from anybatch import Update, supervised
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> update = Update(model, optimizer, supervised(torch.nn.CrossEntropyLoss()), micro_batch=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, update, number=7).name
    'update-00000007'
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise CheckpointError(f"number={number!r}: expected how many updates are done, a whole number, 0 or more.")
    ranks = Ranks.of(update.model)
    path = Path(folder) / f"update-{number:08d}"
    temporary = from_first_rank(lambda: _make_temporary(path), ranks)
    tensors, states = _states_of(update)
    states |= {"loader": None if loader is None else loader.state_dict(), "progress": dict(progress or {})}
    try:
        _write(temporary, tensors, number, states, ranks)
        from_first_rank(lambda: _put_in_place(temporary, path, keep), ranks)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return path


def resume(path: Path | str, update: Update, *, loader: PositionedLoader | None = None) -> Resumed | None:
    """Restore a checkpoint into `update`, all random states, and `loader` if given. Call it on every rank.

    Given a folder, the newest readable checkpoint is used. If this raises, nothing has changed. On the number of ranks that
    saved the checkpoint, each rank gets its own random states back; on another number rank 0 does, and the other ranks are
    seeded from them.

    Args:
        path: A checkpoint, or a folder of checkpoints.
        update: An update with the same model, optimizer, scheduler and scaler as the saved one.
        loader: Data loader with `load_state_dict()`, to be set to its position.

    Returns:
        The checkpoint that was restored, or None if the folder has none.

    Raises:
        CheckpointError: If no checkpoint can be read, or the checkpoint is of another model or optimizer.

    >>> import tempfile, torch
    >>> from anybatch import Update, supervised
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> update = Update(model, optimizer, supervised(torch.nn.CrossEntropyLoss()), micro_batch=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder, update, number=7, progress={"epoch": 2})
    ...     resume(folder, update).progress
    {'epoch': 2}
    """
    ranks = Ranks.of(update.model)
    paths = from_first_rank(lambda: _candidates(Path(path)), ranks)
    passed_over: list[str] = []
    for each in paths:
        try:
            contents = _checked_contents(each, ranks)
            restore = partial(_restore, each, contents, update, loader, ranks)
            return replace(_on_every_rank(restore, each, ranks), passed_over=tuple(passed_over))
        except OtherUpdateError:
            raise
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            passed_over.append(str(error))
    if passed_over:
        raise CheckpointError(f"none of the {len(paths)} checkpoints in {path} can be read: {'; '.join(passed_over)}")
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints of a folder by name, newest first."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))]


def _make_temporary(path: Path) -> Path:
    """Make an empty folder, to fill before it becomes `path`; remove those that killed processes left."""
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
    """Return True if this process left it, or a process that has ended on this host."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or match[1] not in (None, socket.gethostname()):
        return False
    if match[2] is None:
        return True
    try:
        os.kill(int(match[2]), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return int(match[2]) == os.getpid()


def _states_of(update: Update) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an update by name, which may be sharded, and all other states as plain values."""
    model, optimizer = unwrapped(update.model).state_dict(), update.optimizer.state_dict()
    tensors = {f"model.{name}": value for name, value in model.items() if isinstance(value, Tensor)}
    tensors |= _outside_model(update)
    moments: dict[str, tuple[Any, str]] = {}
    rest: dict[Any, dict[str, Any]] = {}
    for key, state in optimizer["state"].items():
        rest[key] = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        for name in (name for name in state if name not in rest[key]):
            moments[f"optimizer.{key}.{name}"] = (key, name)
            tensors[f"optimizer.{key}.{name}"] = state[name]
    return tensors, {
        "model": {name: value for name, value in model.items() if not isinstance(value, Tensor)},
        "optimizer": optimizer | {"state": rest},
        "moments": moments,
        "optimizer_type": type(update.optimizer).__name__,
        **{name: None if part is None else part.state_dict() for name, part in _stateful(update).items()},
    }


def _stateful(update: Update) -> dict[str, Any]:
    """Return the parts of an update that have a plain `state_dict`, by name; None for a part it does not have."""
    split = update.accumulator.split
    own = {"noise": update.noise, "scheduler": update.scheduler, "scaler": update.scaler}
    return own | {"split": split if hasattr(split, "state_dict") else None}


def _outside_model(update: Update) -> dict[str, Tensor]:
    """Return parameters that only the optimizer holds, by their position in it, and the buffers of a coupled loss."""
    own = set(unwrapped(update.model).parameters())
    found = {f"beside.{place}": held.detach() for place, held in enumerate(_stepped(update)) if held not in own}
    loss = update.accumulator.objective.loss
    buffers = loss.named_buffers() if isinstance(loss, nn.Module) else ()
    return found | {f"beside.loss.{name}": held for name, held in buffers}


def _stepped(update: Update) -> list[Tensor]:
    return [parameter for group in update.optimizer.param_groups for parameter in group["params"]]


def _write(folder: Path, tensors: dict[str, Tensor], number: int, states: dict[str, Any], ranks: Ranks) -> None:
    """Fill an empty `folder`, which is on disk when this returns. Every rank calls it with its own tensors."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _as_checkpoint_error(f"{folder} could not be written"):
        save(tensors, storage_writer=FileSystemWriter(folder), process_group=ranks.group, no_dist=ranks.size == 1)
    own = [f"rank-{ranks.rank}.pt"]
    _write_values(folder / own[0], random_states())
    own += [path.name for path in folder.glob(f"__{ranks.rank}_*.distcp")]
    if ranks.rank == 0:
        _write_values(folder / "states.pt", states)
        own += ["states.pt", ".metadata"]
    sums = ranks.gather_objects({name: size_and_checksum(folder / name) for name in own})
    files = {name: of_file for of_rank in sums for name, of_file in of_rank.items()}
    contents = {"anybatch": "checkpoint", "format": FORMAT, "number": number, "ranks": ranks.size, "files": files}
    text = json.dumps(contents | {"sum": _sum_of(contents)}, indent=1)
    from_first_rank(lambda: write_synced(folder / CONTENTS, text.encode()), ranks)


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Raise `CheckpointError` for torch's `CheckpointException`, which is no `Exception` and also wraps Ctrl-C."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
            yield
    except CheckpointException as error:
        for rank, (raised, _) in error.failures.items():
            if not isinstance(raised, Exception):
                raise raised from error
            raise CheckpointError(f"{what}: on rank {rank}, {first_line(raised)}.") from error
        raise


def _write_values(path: Path, values: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    write_synced(path, buffer.getvalue())
    try:  # before a checkpoint that nothing can load gets its name; tensors are mapped, not read
        torch.load(path, weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"a checkpoint with these contents could be written but not read back: {first_line(error)}. Keep to tensors "
            "and plain values in the states of the scheduler, the optimizer, the loader and in progress=."
        ) from error


def random_states() -> dict[str, Any]:
    """Return all random states, as values that `torch.load(weights_only=True)` takes."""
    states = {"torch": torch.get_rng_state(), **outer_random().as_values()}
    if found := torch.accelerator.current_accelerator(check_available=True):
        module = torch.get_device_module(found)
        states[found.type] = [module.get_rng_state(device) for device in range(module.device_count())]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned, except for devices that this machine lacks."""
    torch.set_rng_state(states["torch"])
    OuterRandom.of_values(states).restore()
    if found := torch.accelerator.current_accelerator(check_available=True):
        module = torch.get_device_module(found)
        for device, state in enumerate(states.get(found.type, ())[: module.device_count()]):
            module.set_rng_state(state, device)


def size_and_checksum(path: Path) -> tuple[int, int]:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
        return file.tell(), total


def _sum_of(contents: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(contents, sort_keys=True).encode())


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


def _candidates(path: Path) -> list[Path]:
    if path.is_file() or (path / CONTENTS).exists():
        return [path]
    found = checkpoints_in(path)
    if not found and path.is_dir():
        return sorted((old for old in path.iterdir() if _OLD_NAME.fullmatch(old.name)), reverse=True)
    return found


def _checked_contents(path: Path, ranks: Ranks) -> dict[str, Any]:
    """Read `checkpoint.json` and check the files it lists; each rank checks its part of them."""
    contents = from_first_rank(lambda: _read_contents(path), ranks)

    def check_files() -> None:
        for name in sorted(contents["files"])[ranks.rank :: ranks.size]:
            if problem := _problem(path / name, *contents["files"][name]):
                raise CheckpointError(f"{path} is damaged: {problem}. {ADVICE}")

    _on_every_rank(check_files, path, ranks)
    return contents


def _read_contents(path: Path) -> dict[str, Any]:
    if path.is_file():
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is a file; a checkpoint of this version of anybatch (format {FORMAT}) is a "
            f"folder. Older ones, which were files, are resumed with the version that saved them. {ADVICE}"
        )
    try:
        found = json.loads((path / CONTENTS).read_bytes())
        if found["anybatch"] != "checkpoint":
            raise ValueError(f"it is of {found['anybatch']!r}")
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {found['format']!r}; this version of anybatch reads format {FORMAT}. Resume it with the "
                "version that saved it."
            )
        if found.pop("sum", None) not in (_sum_of(found), None):  # checkpoints of anybatch 0.1 have none
            raise ValueError("it does not have its checksum")
        files = {name: (size, total) for name, (size, total) in found["files"].items()}
        return {"number": found["number"], "ranks": found["ranks"], "files": files}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {CONTENTS}: {first_line(error)}. {ADVICE}") from error


def _problem(path: Path, expected_size: int, expected_sum: int) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    try:
        size, total = size_and_checksum(path)
    except OSError as error:
        return f"{path.name} cannot be read ({first_line(error)})"
    if size != expected_size:
        return f"{path.name} has {size} bytes, not {expected_size}"
    return None if total == expected_sum else f"{path.name} does not have its checksum"


def _on_every_rank(act: Callable[[], T], path: Path, ranks: Ranks) -> T:
    """Call `act`; raise on every rank if it raised on one."""
    result: list[T] = []
    problem: CheckpointError | None = None
    try:
        result.append(act())
    except CheckpointError as error:
        problem = error
    except Exception as error:
        problem = CheckpointError(f"{path} cannot be read: {first_line(error)}. {ADVICE}")
        problem.__cause__ = error
    problems = [one for one in ranks.gather_objects(problem) if one is not None]
    if problems:
        raise problem or problems[0]
    return result[0]


def _restore(
    path: Path, contents: Mapping[str, Any], update: Update, loader: PositionedLoader | None, ranks: Ranks
) -> Resumed:
    states, shapes = _read_values(path / "states.pt"), _read_shapes(path)
    found = Resumed(
        path=path,
        number=contents["number"],
        ranks=contents["ranks"],
        progress=states["progress"],
        loader_state=states["loader"],
    )
    _check_matches(path, states, shapes, update)
    with _restored_after_errors(update):
        _load_states(path, states, shapes, update)
        is_same = found.ranks == ranks.size
        restore_random_states(_read_values(path / f"rank-{ranks.rank if is_same else 0}.pt"))
        if ranks.rank and not is_same:
            seed_rank(ranks.rank)
        if loader is not None and found.loader_state is not None:
            loader.load_state_dict(found.loader_state)
    return found


def _read_values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return values


def _read_shapes(path: Path) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds, unsharded, on the meta device."""
    found = _read_metadata(path).state_dict_metadata
    return {name: torch.empty(held.size, dtype=held.properties.dtype, device="meta") for name, held in found.items()}


def _read_metadata(path: Path) -> Any:
    with (path / ".metadata").open("rb") as file:
        return _MetadataUnpickler(file).load()


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that builds torch's `Metadata` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if "." in name:  # an attribute of something in the module, which may be anything
            raise pickle.UnpicklingError(f"{module}.{name} is no class of a module")
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == (get_layout.__module__, get_layout.__name__):
            return get_layout
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath  # where it was saved: never opened
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            found = super().find_class(module, name)
            if isinstance(found, type) and (issubclass(found, Enum) or hasattr(found, "__dataclass_fields__")):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into the metadata of a checkpoint")


def read_tensors(path: Path, into: dict[str, Tensor]) -> None:
    """Fill these tensors, or this rank's shards of them, with the values stored under their names."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return _read_metadata(path)

    with _as_checkpoint_error(f"{path} could not be read"):
        load(into, storage_reader=Reader(path), no_dist=True)  # each rank reads what it needs


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): held for name, held in tensors.items() if name.startswith(prefix)}


def _optimizer_state(states: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    state: dict[Any, dict[str, Any]] = {key: dict(values) for key, values in states["optimizer"]["state"].items()}
    for full, (key, name) in states["moments"].items():
        state[key][name] = tensors[full]
    return {**states["optimizer"], "state": state}


def _check_matches(path: Path, states: Mapping[str, Any], shapes: Mapping[str, Tensor], update: Update) -> None:
    if found := _differences(_under("model.", shapes) | states["model"], unwrapped(update.model).state_dict()):
        name, saved, there = found[0]
        raise OtherUpdateError(
            f"{path} is of another model: {name!r} is {saved} in the checkpoint and {there} in the model "
            f"({len(found)} differ). Resume with the task that saved it."
        )
    if found := _differences(_under("beside.", shapes), _under("beside.", _outside_model(update))):
        name, saved, there = found[0]
        raise OtherUpdateError(
            f"{path} has other parameters beside the model, such as a loss's: {name!r} of the optimizer or the loss is {saved} "
            f"in the checkpoint and {there} in this run. Give the optimizer the parameters that it had when it was saved."
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


def _differences(saved: Mapping[str, object], there: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return (name, saved, there) for values of another shape or type, sorted by name."""

    def described(values: Mapping[str, object], name: str) -> str:
        value = values.get(name)
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)} {value.dtype}"
        return type(value).__name__ if name in values else "missing"

    pairs = ((name, described(saved, name), described(there, name)) for name in sorted(saved.keys() | there.keys()))
    return [(name, before, now) for name, before, now in pairs if before != now]


@contextmanager
def _restored_after_errors(update: Update) -> Iterator[None]:
    """Restore the update and all random states if the block raises."""
    optimizer, random = update.optimizer, random_states()
    held = [*unwrapped(update.model).state_dict().values(), *_outside_model(update).values()]
    tensors = [(value, value.detach().clone()) for value in held if isinstance(value, Tensor)]
    steps, groups = optimizer.state, optimizer.param_groups  # loading makes new ones
    parts = [part for part in _stateful(update).values() if part is not None]
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    try:
        yield
    except BaseException:
        restore_random_states(random)
        with torch.no_grad():
            for value, before in tensors:
                value.copy_(before)
        optimizer.state, optimizer.param_groups = steps, groups
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        raise


def _load_states(path: Path, states: Mapping[str, Any], shapes: Mapping[str, Tensor], update: Update) -> None:
    parameters = dict(enumerate(_stepped(update)))
    moments = {name: _empty_for(shapes[name], parameters.get(key)) for name, (key, _) in states["moments"].items()}
    read_tensors(path, moments)
    try:
        update.optimizer.load_state_dict(_optimizer_state(states, moments))
    except ValueError as error:
        raise OtherUpdateError(
            f"{path} does not fit this optimizer: {first_line(error)}. Resume with the optimizer that it was saved with."
        ) from error
    model = unwrapped(update.model)
    weights = model.state_dict()
    read_tensors(path, {f"model.{name}": value for name, value in weights.items() if isinstance(value, Tensor)})
    model.load_state_dict(weights | states["model"])
    read_tensors(path, _outside_model(update))
    for name, part in _stateful(update).items():
        if part is not None and states.get(name) is not None:
            part.load_state_dict(states[name])


def _empty_for(like: Tensor, parameter: Tensor | None) -> Tensor:
    """Return a tensor to read into, sharded like its parameter if it has the parameter's shape."""
    if parameter is not None and is_sharded(parameter) and parameter.shape == like.shape:
        return torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)
    return torch.empty(like.shape, dtype=like.dtype)
