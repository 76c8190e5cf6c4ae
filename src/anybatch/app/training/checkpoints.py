"""Checkpoints at update boundaries: written whole or not at all, checked when read, on any number of ranks.

A checkpoint is a folder that `torch.distributed.checkpoint` fills. It can be saved by any number of ranks, DDP, FSDP2 or one
process, and resumed by any other.

    .metadata, __<rank>_0.distcp   the tensors of model and optimizer, each rank its part; whole tensors are split among ranks
    rank-<rank>.pt                 the random states of a rank
    states.pt                      all else, as plain values: scheduler, scaler, position in the data
    checkpoint.json                number, ranks, and the size and checksum of each file; written last

Reading runs no code from the files: they are unpickled by `weights_only=True`, and `.metadata` by a list of the few classes
that it is made of.
"""

import copy
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
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from anybatch.app.records.run_folder import sync_folder, write_synced
from anybatch.app.training.ranks import from_first_rank, seed_rank
from anybatch.core import ONE_PROCESS, OuterRandom, Ranks, Update, get_layout, is_sharded, outer_random
from anybatch.errors import CheckpointError, first_line
from anybatch.parallel import unwrapped

FORMAT = 2
CONTENTS = "checkpoint.json"
ADVICE = "Give a checkpoint that anybatch saved, or its folder to use the newest good one."
_NAME = re.compile(r"update-(\d+)(-replaced)?")
_OLD_NAME = re.compile(r"update-\d+\.pt")
_TEMPORARY = re.compile(r"\.update-\d+(?:-replaced)?(?:\.(.+)\.(\d+))?")
"""A folder that is being filled or deleted: on which host, by which process; older versions of anybatch did not say."""

T = TypeVar("T")
Sums = dict[str, tuple[int, int]]
"""Bytes and CRC-32 of files."""


class OtherUpdateError(CheckpointError):
    """A checkpoint of another model, optimizer or run: no older one of its folder would fit either."""


class PositionedLoader(Protocol):
    """A loader that knows its position, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Values that `resume` has read and not put back into the update."""

    path: Path
    number: int
    """Updates done when it was saved."""
    ranks: int
    """How many ranks saved it."""
    progress: Mapping[str, Any]
    """The `progress` that `save` was given."""
    loader_state: dict[str, Any] | None
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

    Call it between two updates, on every rank; `number` is how many are done, `progress` plain values of your own. The loader's
    state and `progress` are those of rank 0. The checkpoint appears under its name when it is complete and on the disk: a kill
    at any moment leaves the older ones as they were.
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
    """Put a checkpoint back into `update`, into all random states, and into `loader` if one is given; on every rank.

    `path` is a checkpoint, or a folder of them: then the newest that can be read is used, and None is returned where there
    is none at all. A checkpoint of another model or optimizer raises. Whatever raises here changes nothing. On as many ranks as
    saved it, each gets its own random states back; on another number rank 0 does, and the others are seeded from them.
    """
    ranks = Ranks.of(update.model)

    def take(found: Resumed, states: dict[str, Any]) -> Resumed:
        shapes = _read_shapes(found.path)
        _check_fits(found.path, states, shapes, update)
        with _put_back_after_errors(update):
            _load_states(found.path, states, shapes, update)
            is_same = found.ranks == ranks.size
            restore_random_states(_read_values(found.path / f"rank-{ranks.rank if is_same else 0}.pt"))
            if ranks.rank and not is_same:
                seed_rank(ranks.rank)
            if loader is not None and found.loader_state is not None:
                loader.load_state_dict(found.loader_state)
        return found

    return _newest(Path(path), ranks, take)


def read(path: Path) -> tuple[Resumed, dict[str, Any]] | None:
    """All of a checkpoint, or of the newest good one of a folder, whole and in this process; None where the folder has none."""

    def take(found: Resumed, states: dict[str, Any]) -> tuple[Resumed, dict[str, Any]]:
        tensors = {name: torch.empty(like.shape, dtype=like.dtype) for name, like in _read_shapes(found.path).items()}
        read_tensors(found.path, tensors)
        return found, states | {
            "number": found.number,
            "model": _under("model.", tensors) | states["model"],
            "optimizer": _optimizer_state(states, tensors),
            "random": [_read_values(found.path / f"rank-{rank}.pt") for rank in range(found.ranks)],
        }

    return _newest(path, ONE_PROCESS, take)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder by name, newest first."""
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, key=lambda pair: (-int(pair[0][1]), pair[0][2] is not None))]


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
    """True if this process left it, or one that has ended on this host; what others fill is left alone."""
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
    found = {f"beside.{place}": held.detach() for place, held in enumerate(_stepped(update)) if held not in own}
    loss = update.accumulator.objective.loss
    buffers = loss.named_buffers() if isinstance(loss, nn.Module) else ()
    return found | {f"beside.loss.{name}": held for name, held in buffers}


def _stepped(update: Update) -> list[Tensor]:
    return [parameter for group in update.optimizer.param_groups for parameter in group["params"]]


def _write(folder: Path, tensors: dict[str, Tensor], number: int, states: dict[str, Any], ranks: Ranks) -> None:
    """Fill an empty `folder`, on the disk when this returns; every rank calls it, with its own tensors."""
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
    """torch's `CheckpointException` wraps whatever was raised on any rank, Ctrl-C too, and is no `Exception` itself."""
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
    with path.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        # the tensors are mapped, not read: this looks at the rest, before a checkpoint that nobody can load gets its name
        torch.load(path, weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"a checkpoint with these contents could be written but not read back: {first_line(error)}. Keep to tensors "
            "and plain values in the states of the scheduler, the optimizer, the loader and in progress=."
        ) from error


def random_states() -> dict[str, Any]:
    """All random states, as tensors and plain values that `torch.load(weights_only=True)` takes."""
    states = {"torch": torch.get_rng_state(), **outer_random().as_values()}
    if found := torch.accelerator.current_accelerator(check_available=True):
        module = torch.get_device_module(found)
        states[found.type] = [module.get_rng_state(device) for device in range(module.device_count())]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` read; devices that this machine lacks are left out."""
    torch.set_rng_state(states["torch"])
    OuterRandom.of_values(states).restore()
    if found := torch.accelerator.current_accelerator(check_available=True):
        module = torch.get_device_module(found)
        for device, state in enumerate(states.get(found.type, ())[: module.device_count()]):
            module.set_rng_state(state, device)


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
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


def _newest(path: Path, ranks: Ranks, take: Callable[[Resumed, dict[str, Any]], T]) -> T | None:
    """Call `take` with the newest checkpoint that every rank can read; None where there is none."""
    paths = from_first_rank(lambda: _candidates(path), ranks)
    passed_over: list[str] = []

    def open_and_take(candidate: Path, number: int, num_ranks: int) -> T:
        states = _read_values(candidate / "states.pt")
        found = Resumed(
            path=candidate,
            number=number,
            ranks=num_ranks,
            progress=states["progress"],
            loader_state=states["loader"],
            passed_over=tuple(passed_over),
        )
        return take(found, states)

    for candidate in paths:
        try:
            number, num_ranks, sums = from_first_rank(lambda: _read_contents(candidate), ranks)  # noqa: B023
            _check_files(candidate, sums, ranks)
            return _on_every_rank(lambda: open_and_take(candidate, number, num_ranks), candidate, ranks)  # noqa: B023
        except OtherUpdateError:
            raise
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            passed_over.append(str(error))
    if passed_over:
        raise CheckpointError(f"none of the {len(paths)} checkpoints in {path} can be read: {'; '.join(passed_over)}")
    return None


def _candidates(path: Path) -> list[Path]:
    if path.is_file() or (path / CONTENTS).exists():
        return [path]
    found = checkpoints_in(path)
    if not found and path.is_dir():
        return sorted((old for old in path.iterdir() if _OLD_NAME.fullmatch(old.name)), reverse=True)
    return found


def _read_contents(path: Path) -> tuple[int, int, Sums]:
    """Number, ranks and files that a checkpoint must have; what is no checkpoint of this format is refused by name."""
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
        return found["number"], found["ranks"], files
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {CONTENTS}: {first_line(error)}. {ADVICE}") from error


def _check_files(path: Path, sums: Sums, ranks: Ranks) -> None:
    """Raise on every rank if a file is missing or damaged; each rank looks at its part of them."""
    names = sorted(sums)[ranks.rank :: ranks.size]
    found = ranks.gather_objects([problem for name in names if (problem := _problem(path / name, *sums[name]))])
    problems = [problem for of_rank in found for problem in of_rank]
    if problems:
        raise CheckpointError(f"{path} is damaged: {problems[0]}. {ADVICE}")


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
    done: list[T] = []
    problem: CheckpointError | None = None
    try:
        done.append(act())
    except CheckpointError as error:
        problem = error
    except Exception as error:
        problem = CheckpointError(f"{path} cannot be read: {first_line(error)}. {ADVICE}")
        problem.__cause__ = error
    told = [one for one in ranks.gather_objects(problem) if one is not None]
    if told:
        raise problem or told[0]
    return done[0]


def _read_values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return values


def _read_shapes(path: Path) -> dict[str, Tensor]:
    """The tensors that a checkpoint holds, each as a whole and without its numbers."""
    found = _read_metadata(path).state_dict_metadata
    return {name: torch.empty(held.size, dtype=held.properties.dtype, device="meta") for name, held in found.items()}


def _read_metadata(path: Path) -> Any:
    with (path / ".metadata").open("rb") as file:
        try:
            return _MetadataUnpickler(file).load()
        except Exception as error:
            raise CheckpointError(f"{path / '.metadata'} cannot be read: {first_line(error)}. {ADVICE}") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Builds torch's `Metadata` and nothing else."""

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
    """Fill these tensors, or this rank's part of those that are sharded, with what is stored under their names."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return _read_metadata(path)

    with _as_checkpoint_error(f"{path} could not be read"):
        # each rank reads what it needs: nothing has to be agreed on
        load(into, storage_reader=Reader(path), no_dist=True)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): held for name, held in tensors.items() if name.startswith(prefix)}


def _optimizer_state(states: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The optimizer's `state_dict`, put together again."""
    state: dict[Any, dict[str, Any]] = {key: dict(values) for key, values in states["optimizer"]["state"].items()}
    for full, (key, name) in states["moments"].items():
        state[key][name] = tensors[full]
    return {**states["optimizer"], "state": state}


def _check_fits(path: Path, states: Mapping[str, Any], shapes: Mapping[str, Tensor], update: Update) -> None:
    """Raise before anything is changed."""
    if found := _differences(_under("model.", shapes) | states["model"], unwrapped(update.model).state_dict()):
        name, saved, there = found[0]
        raise OtherUpdateError(
            f"{path} is of another model: {name!r} is {saved} in the checkpoint and {there} in the model "
            f"({len(found)} differ). Resume with the task that saved it."
        )
    if found := _differences(_under("beside.", shapes), _under("beside.", _beside(update))):
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
    """Names, sorted, whose values are of other shapes or kinds, and what they are on both sides."""

    def described(values: Mapping[str, object], name: str) -> str:
        value = values.get(name)
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)} {value.dtype}"
        return type(value).__name__ if name in values else "missing"

    pairs = ((name, described(saved, name), described(there, name)) for name in sorted(saved.keys() | there.keys()))
    return [(name, before, now) for name, before, now in pairs if before != now]


@contextmanager
def _put_back_after_errors(update: Update) -> Iterator[None]:
    """The block for `_load_states`: where anything raises in it, update and random states are as they were before."""
    optimizer, model, random = update.optimizer, unwrapped(update.model), random_states()
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)} | _beside(update)
    tensors = [(value, value.detach().clone()) for value in held.values()]
    steps, groups = optimizer.state, optimizer.param_groups  # loading makes new ones
    stateful: list[Any] = [update.scheduler, update.scaler, update.accumulator.split]
    parts = [part for part in stateful if hasattr(part, "load_state_dict")]
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
    parameters = _stepped(update)
    moments = {
        name: _empty_for(shapes[name], parameters[key] if isinstance(key, int) and key < len(parameters) else None)
        for name, (key, _) in states["moments"].items()
    }
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
    read_tensors(path, _beside(update))
    if update.scheduler is not None:
        update.scheduler.load_state_dict(states["scheduler"])
    if update.scaler is not None:
        update.scaler.load_state_dict(states["scaler"])
    if update.noise is not None:
        update.noise.load_state_dict(states.get("noise"))
    if states.get("split") is not None and hasattr(split := update.accumulator.split, "load_state_dict"):
        split.load_state_dict(states["split"])  # the costs that it learnt: the cut goes on as it was


def _empty_for(like: Tensor, parameter: Tensor | None) -> Tensor:
    """A tensor to read into: sharded as its parameter is, if it is of the parameter's size."""
    if parameter is not None and is_sharded(parameter) and parameter.shape == like.shape:
        return torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)
    return torch.empty(like.shape, dtype=like.dtype)
