"""A folder with the files of one run.

JSON files are written to a temporary file, synced and renamed, so a reader never sees half of one. `run.json`, which a resume
needs, has a copy. A kill may truncate the last line of `metrics.jsonl`; lines that are no JSON object are ignored.
"""

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anybatch.app.records.schema import (
    Comparison,
    EpochDone,
    MemorySeen,
    Metric,
    PlanRecord,
    ProofRecord,
    Run,
    Trace,
    UpdateDone,
    WindowSeen,
)
from anybatch.app.records.tolerant_reading import Record, loads, plain, read, to_json, whole
from anybatch.errors import RunError

ADVICE = "Give the folder that `anybatch train`, `compare`, `trace`, `plan` or `verify` named when it ended."
LOCK = "run.lock"
METRICS: dict[str, type[Metric]] = {kind.event: kind for kind in (UpdateDone, EpochDone, WindowSeen, MemorySeen)}
_COPY = "run.copy.json"
_ERRORS = "backslashreplace"  # for file names that are not Unicode


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def write(self, record: Run | Comparison | Trace | ProofRecord | PlanRecord) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.path / record.file, to_json(record, indent=1))

    def append(self, metric: Metric) -> None:
        """Append a line to `metrics.jsonl`, which survives a kill of this process."""
        with self.metrics.open("a", encoding="utf-8", errors=_ERRORS) as file:
            file.write(to_json({"event": metric.event} | plain(metric)) + "\n")

    def keep(self, run: Run) -> None:
        """Sync `metrics.jsonl` and a copy of `run.json` to disk, before each checkpoint."""
        if self.metrics.is_file():
            with self.metrics.open("ab") as file:
                os.fsync(file.fileno())
        copy, text = self.path / _COPY, to_json(run, indent=1)
        if not copy.is_file() or copy.read_text(encoding="utf-8", errors="replace") != text:
            _replace(copy, text)

    def read_run(self) -> Run:
        """Read `run.json`, or its copy if that fails; it must name a kind and a task."""
        try:
            return self._read_run(Run.file)
        except RunError:
            if not (self.path / _COPY).is_file():
                raise
            return self._read_run(_COPY)

    def _read_run(self, name: str) -> Run:
        fields = self.read_object(name)
        if fields is None:
            what = (
                f"has no {Run.file}" if self.path.is_dir() else "is a file" if self.path.is_file() else "does not exist"
            )
            raise RunError(
                f"{str(self.path)!r} {what}; a run folder holds {Run.file}, and metrics.jsonl, compare.json, trace.json, "
                f"plan.json or verify.json. {ADVICE}"
            )
        run = read(Run, fields)
        if run is None or not run.kind or not run.task:
            raise RunError(
                f"{str(self.path / Run.file)!r} has the keys {sorted(fields)}; 'kind' and 'task' were expected. It is not of a "
                f"run of anybatch. {ADVICE}"
            )
        return run

    def read_object(self, name: str) -> Mapping[str, Any] | None:
        """Read the JSON object in a file; None if there is no such file."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            loaded = loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{str(path)!r} is not JSON ({error}); anybatch writes it whole or not at all. Restore the file, or run again."
            ) from None
        if not isinstance(loaded, Mapping):
            raise RunError(
                f"{str(path)!r} holds a {type(loaded).__name__}; a JSON object was expected. Restore the file, or run again."
            )
        return loaded

    def read_metrics(self) -> list[Mapping[str, Any]]:
        return [event for _, event in self.lines() if event is not None]

    def rewind(self, update: int) -> int:
        """Delete the lines of `metrics.jsonl` about later updates, which will run again, and unreadable lines.

        Returns the number of unreadable lines, without a last line that a kill truncated.
        """
        lines = list(self.lines())
        kept = [line for line, event in lines if event is not None and (whole(event.get("update")) or 0) <= update]
        _replace(self.metrics, "".join(line + "\n" for line in kept))
        return sum(event is None for _, event in lines[:-1])

    def lines(self) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
        """Yield the lines of `metrics.jsonl`, each with its JSON object or None."""
        if not self.metrics.is_file():
            return
        with self.metrics.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    event = loads(line)
                except (ValueError, RecursionError):
                    event = None
                yield line.rstrip("\n"), event if isinstance(event, Mapping) else None


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_synced(temporary, text.encode(errors=_ERRORS))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, or raise an error that names the process that holds it.

    The system releases the lock when the process ends; the file stays. A folder that was made here and stays empty is removed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(handle, folder)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        if [path.name for path in folder.glob("*")] == [LOCK]:
            (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _take(handle: int, folder: Path) -> None:
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by child processes
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a file system without locks
        holder = os.pread(handle, 500, 0).decode(errors="replace").strip() or "another process"
        raise RunError(
            f"{folder} is in use by {holder}. Wait for its end, or end it; a new run can go to another --out."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All records of a run, from which its report is made."""

    run: Run
    updates: tuple[UpdateDone, ...] = ()
    epochs: tuple[EpochDone, ...] = ()
    windows: tuple[WindowSeen, ...] = ()  # stages are in the order of time; the first starts at 0
    memory: tuple[MemorySeen, ...] = ()
    comparison: Comparison | None = None
    trace: Trace | None = None
    proof: ProofRecord | None = None
    plan: PlanRecord | None = None
    num_unreadable: int = 0  # lines of `metrics.jsonl` that are no JSON object


def read_results(path: Path) -> Results:
    """Read all results of a run folder.

    For an update that was logged twice, before a kill and after the resume, the later line counts.
    """
    folder = RunFolder(path)
    run = folder.read_run()
    events = [event for _, event in folder.lines()]
    kinds = [(METRICS.get(str(event.get("event"))), event) for event in events if event is not None]
    found = [metric for kind, event in kinds if kind and (metric := read(kind, event)) is not None]
    metrics = [_completed(metric) for metric in found if not isinstance(metric, WindowSeen) or metric.stages]

    def last_of_each(kind: type[Record], number: str) -> tuple[Record, ...]:
        by_number = {getattr(metric, number): metric for metric in metrics if isinstance(metric, kind)}
        return tuple(by_number[key] for key in sorted(by_number))

    def in_file(record: Any) -> Any:
        return read(record, folder.read_object(record.file) or None)

    return Results(
        run=run,
        updates=last_of_each(UpdateDone, "update"),
        epochs=last_of_each(EpochDone, "epoch"),
        windows=last_of_each(WindowSeen, "update"),
        memory=last_of_each(MemorySeen, "update"),
        comparison=in_file(Comparison),
        trace=in_file(Trace),
        proof=in_file(ProofRecord),
        plan=in_file(PlanRecord),
        num_unreadable=sum(event is None for event in events),
    )


def _completed(metric: Metric) -> Metric:
    """Sort stages by time, the first at 0; set a missing memory peak to the highest point."""
    if isinstance(metric, WindowSeen):
        stages = sorted(metric.stages, key=lambda stage: stage.start)
        return replace(metric, stages=tuple(replace(stage, start=stage.start - stages[0].start) for stage in stages))
    if isinstance(metric, MemorySeen) and metric.peak_bytes is None:
        return replace(metric, peak_bytes=max((point.bytes for point in metric.points), default=None))
    return metric
