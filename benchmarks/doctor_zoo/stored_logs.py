"""The logs of the zoo, made small, so that the rules can be tried on every script without running one."""

import json
import lzma
from pathlib import Path
from typing import Any

from anybatch.doctor.log import Log, from_hex, read_logs

STORED = Path(__file__).parent / "stored_logs.json.xz"
PROBED, DIGITS = 4, 4
"""Numbers of a probed gradient that are kept, and their digits."""

StoredLogs = list[list[dict[str, Any]]]
"""The lines of each process of one script."""


def small_logs(folder: Path) -> StoredLogs:
    """Of one run."""
    return [[_small(dict(line)) for line in log.events] for log in read_logs(folder) if log.has_passes]


def _small(line: dict[str, Any]) -> dict[str, Any]:
    line.pop("t", None)
    if isinstance(line.get("place"), dict):
        line["place"] = {**line["place"], "file": Path(str(line["place"].get("file", ""))).name}
    if "probe" in line:
        line["probe"] = {
            key: [_rounded(value) for value in from_hex(row)[:PROBED]] for key, row in line["probe"].items()
        }
    if isinstance(line.get("loss"), float):
        line["loss"] = _rounded(line["loss"])
    return line


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def store(logs: dict[str, StoredLogs]) -> None:
    """For the tests, beside those that are stored already."""
    logs = _read() | logs
    STORED.write_bytes(lzma.compress(json.dumps(logs, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME))


def stored() -> dict[str, list[Log]]:
    """By the name of the script."""
    return {name: [Log(name, tuple(lines)) for lines in logs] for name, logs in _read().items()}


def _read() -> dict[str, StoredLogs]:
    read: dict[str, StoredLogs] = json.loads(lzma.decompress(STORED.read_bytes())) if STORED.exists() else {}
    return read
