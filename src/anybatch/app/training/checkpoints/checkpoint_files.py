"""A checkpoint on disk: a folder that `torch.distributed.checkpoint` fills, with the sum of every file.

    .metadata, __<rank>_0.distcp   the tensors of model and optimizer, each rank its part; whole tensors are split among ranks
    rank-<rank>.pt                 the random states of a rank
    states.pt                      all else, as plain values
    checkpoint.json                number, ranks, and the size and checksum of each file; written last

Tensors can be read back in any other division over ranks. Reading runs no code from the files: they are unpickled by
`weights_only=True`, and `.metadata` by a list of the few classes that it is made of.
"""

import json
import os
import pathlib
import pickle
import random
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybatch.app.training.launch.spreading import from_first_rank
from anybatch.core import OuterRandom, Ranks, outer_random, read_layout
from anybatch.errors import CheckpointError, first_line

FORMAT = 2


CONTENTS = "checkpoint.json"


ADVICE = "Give a checkpoint that anybatch saved, or its folder to use the newest good one."


_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """`checkpoint.json`: what a whole checkpoint has."""

    number: int
    """Updates done."""
    ranks: int
    """How many ranks saved it."""
    files: Mapping[str, tuple[int, int]]
    """Bytes and CRC-32 of each file."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor, without its numbers."""

    size: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{tuple(self.size)} {self.dtype}"


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    *,
    number: int,
    states: Mapping[str, Any],
    random: Mapping[str, Any],
    ranks: Ranks,
) -> None:
    """Fill an empty `folder`, on the disk when this returns; every rank calls it, with its own tensors."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with _as_checkpoint_error(f"{folder} could not be written"):
        save(tensors, storage_writer=FileSystemWriter(folder), process_group=ranks.group, no_dist=ranks.size == 1)
    own = [f"rank-{ranks.rank}.pt"]
    _write_values(folder / own[0], random)
    own += [path.name for path in folder.glob(f"__{ranks.rank}_*.distcp")]
    if ranks.rank == 0:
        _write_values(folder / "states.pt", states)
        own += ["states.pt", ".metadata"]
    sums = ranks.gather_objects({name: size_and_checksum(folder / name) for name in own})
    files = {name: of_file for of_rank in sums for name, of_file in of_rank.items()}
    contents = {"anybatch": "checkpoint", "format": FORMAT, "number": number, "ranks": ranks.size, "files": files}
    text = json.dumps(contents | {"sum": _sum_of(contents)}, indent=1)
    from_first_rank(lambda: _write_synced(folder / CONTENTS, text.encode()), ranks)


def read_contents(path: Path) -> CheckpointContents:
    """The contents that a checkpoint must have; what is no checkpoint of this format is refused by name."""
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
        return CheckpointContents(number=found["number"], ranks=found["ranks"], files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {CONTENTS}: {first_line(error)}. {ADVICE}") from error


def _sum_of(contents: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(contents, sort_keys=True).encode())


def check(path: Path, contents: CheckpointContents, ranks: Ranks) -> None:
    """Raise on every rank if a file is missing or damaged; each rank looks at its part of them."""
    names = sorted(contents.files)[ranks.rank :: ranks.size]
    found = ranks.gather_objects(
        [problem for name in names if (problem := _problem(path / name, contents.files[name]))]
    )
    problems = [problem for of_rank in found for problem in of_rank]
    if problems:
        raise CheckpointError(f"{path} is damaged: {problems[0]}. {ADVICE}")


def read_values(path: Path) -> dict[str, Any]:
    """A file of plain values and tensors."""
    values: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return values


def read_shapes(path: Path) -> dict[str, TensorShape]:
    """The tensors that a checkpoint holds, each as a whole."""
    found = _read_metadata(path).state_dict_metadata
    return {name: TensorShape(entry.size, entry.properties.dtype) for name, entry in found.items()}


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


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Bytes and CRC-32 of a file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
        return file.tell(), total


def _problem(path: Path, expected: tuple[int, int]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    try:
        size, total = size_and_checksum(path)
    except OSError as error:
        return f"{path.name} cannot be read ({first_line(error)})"
    if size != expected[0]:
        return f"{path.name} has {size} bytes, not {expected[0]}"
    return None if total == expected[1] else f"{path.name} does not have its checksum"


def _write_values(path: Path, values: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(dict(values), file)
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


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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


class _MetadataUnpickler(pickle.Unpickler):
    """Builds torch's `Metadata` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if "." in name:  # an attribute of something in the module, which may be anything
            raise pickle.UnpicklingError(f"{module}.{name} is no class of a module")
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == (read_layout.__module__, read_layout.__name__):
            return read_layout
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath  # where it was saved: never opened
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            found = super().find_class(module, name)
            if isinstance(found, type) and (issubclass(found, Enum) or hasattr(found, "__dataclass_fields__")):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into the metadata of a checkpoint")


def _read_metadata(path: Path) -> Any:
    with (path / ".metadata").open("rb") as file:
        try:
            return _MetadataUnpickler(file).load()
        except Exception as error:
            raise CheckpointError(f"{path / '.metadata'} cannot be read: {first_line(error)}. {ADVICE}") from error


def seed_all(seed: int) -> None:
    """Seed torch on every device, Python, and NumPy where it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_states() -> dict[str, Any]:
    """All random states, as tensors and plain values that `torch.load(weights_only=True)` takes."""
    states = {"torch": torch.get_rng_state(), **outer_random().as_values()}
    for name, module in _accelerators():
        states[name] = [module.get_rng_state(device) for device in range(module.device_count())]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` read; devices that this machine lacks are left out."""
    torch.set_rng_state(states["torch"])
    OuterRandom.of_values(states).restore()
    for name, module in _accelerators():
        for device, state in enumerate(states.get(name, ())[: module.device_count()]):
            module.set_rng_state(state, device)


def _accelerators() -> list[tuple[str, Any]]:
    """The kind of accelerator that this machine has, and torch's module for it: one, or none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return [] if found is None else [(found.type, torch.get_device_module(found))]


def seed_rank(rank: int) -> None:
    """Seed everything from the next draw of torch's state: where all ranks have the same, each gets another."""
    drawn = int(torch.randint(2**62, ()))
    seed_all((drawn + rank * 1_000_003) % 2**63)
