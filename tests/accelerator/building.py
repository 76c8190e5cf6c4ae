"""Compiling the pretend accelerator: once, kept under the virtual environment, by what it was compiled from and with.

`python -m tests.accelerator.building` is what `make` calls. Tests that find nothing compiled compile it themselves.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
KEPT = Path(sys.prefix) / "pretend-accelerator"
NAME = "pretend_accelerator"


class NoCompilerError(Exception):
    """There is nothing to compile C++ with."""


def compiler() -> str:
    """The C++ compiler that `CXX` names, or the first of those that machines have."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if found := shutil.which(name):
            return found
    raise NoCompilerError(
        "no C++ compiler is found (c++, g++, clang++, or what CXX names), and the tests on the pretend accelerator are "
        "compiled by one. Install one (Debian: apt-get install g++), then run make test again."
    )


def library() -> Path:
    """Where the compiled device lies: a folder per source, torch and Python."""
    source = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    told = f"{torch.__version__} {sys.version} {Path(__file__).read_text()}".encode()
    return KEPT / hashlib.sha256(source + told).hexdigest()[:16] / f"{NAME}.so"


def build() -> Path:
    """The compiled device; whoever comes while another compiles waits for it."""
    path = library()
    if path.exists():
        return path
    cxx = compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:  # let go by the system when its process ends, however it ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(cxx, path)
    return path


def _compile(cxx: str, path: Path) -> None:
    of_torch = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = ["-std=c++20", "-fPIC", "-O1", "-w", abi, f"-I{of_torch / 'include'}"]
    objects = {source: path.parent / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}

    def compile_one(source: Path) -> None:
        _run([cxx, *options, "-c", str(source), "-o", str(objects[source])])

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, objects))
    made = path.with_suffix(".made")
    libraries = [f"-L{of_torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    _run([cxx, "-shared", *map(str, objects.values()), *libraries, "-o", str(made)])
    made.rename(path)  # whole or not at all
    for one in objects.values():
        one.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")


if __name__ == "__main__":
    try:
        build()
    except NoCompilerError as error:
        sys.exit(str(error))
