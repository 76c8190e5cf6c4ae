"""Run every benchmark, one after the other; `--quick` for fewer rounds."""

import subprocess
import sys

BENCHMARKS = [
    "exactness",
    "peak",
    "memory",
    "overhead",
    "ragged",
    "coupled",
    "batchnorm",
    "dropout",
    "ranks",
    "scale",
]


def main() -> None:
    for number, name in enumerate(BENCHMARKS, start=1):
        print(f"[{number}/{len(BENCHMARKS)}] benchmarks.{name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
