"""Command line, printing and result files that the benchmarks share."""

import argparse
import json
import platform
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.meter import Timing

DOCS = Path(__file__).parent.parent / "docs"


def is_quick(description: str | None, meaning: str) -> bool:
    """Parse a command line whose only option is `--quick`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=meaning)
    return bool(parser.parse_args().quick)


def print_timings(title: str, timings: Mapping[str, Timing], notes: Mapping[str, str] = {}) -> None:
    """Print the ratio, its quartiles and the time of each contender, and a note where there is one."""
    print(f"\n{title}", flush=True)
    for name, timing in timings.items():
        low, high = timing.spread
        print(
            f"  {name:36} {timing.ratio:6.3f}   quartiles {low:.3f} to {high:.3f}   {timing.seconds * 1e3:9.3f} ms"
            f"{notes.get(name, '')}",
            flush=True,
        )


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version(), **{package: version(package) for package in ("torch", *packages)}}


def write_results(name: str, content: Mapping[str, Any], *packages: str) -> None:
    """Write docs/benchmarks/NAME.json: `content`, the date, and the versions of torch and `packages`."""
    path = DOCS / "benchmarks" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    stamped = {"date": date.today().isoformat(), "versions": versions(*packages), **content}
    path.write_text(json.dumps(stamped, indent=1) + "\n")
    print(f"\nwritten to docs/benchmarks/{path.name}")
