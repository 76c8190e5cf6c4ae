"""The public face: complete, sorted, cheap to import; and the rooms know only those below them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anybatch
from anybatch import api

SOURCE = Path(anybatch.__file__).parent
ROOMS = [
    "lazy",
    "errors",
    "sizes",
    "low_precision",
    "torch_inside",
    "host_memory",
    "events",
    "stages",
    "batches",
    "parallel",
    "state",
    "objectives",
    "norms",
    "dropout",
    "gradients",
    "passes",
    "proof",
    "update",
    "memory",
    "projection",
    "records",
    "training",
    "lessons",
    "api",
    "report",
    "cli",
    "__main__",
]
"""Each may import those before it; the command line alone imports the report, and the report only errors and records."""


WORDS = {("micro_batch_option.py", "anybatch.memory")}
"""The word "auto" is spelled out where `micro_batch=` is read, and stands for a split of a later room."""


def test_every_public_name_is_imported_and_listed_in_order():
    imported = [name for name in vars(api) if not name.startswith("_") and name != "anybatch"]
    assert sorted(imported) == sorted(api.__all__)
    assert sorted(api.__all__, key=lambda name: name) == api.__all__
    assert dir(anybatch) == sorted([*api.__all__, "__version__"])


def test_the_names_of_the_design_are_there():
    designed = (
        "Update Accumulator Window Objective supervised huggingface Coupled rows Rows Tokens Auto Fit PerRow windows "
        "MicroBatches plan verify scale_lr warmup save resume row_dropout"
    )
    assert set(designed.split()) <= set(api.__all__)


def test_import_star_gives_the_public_names():
    namespace: dict[str, object] = {}
    exec("from anybatch import *", namespace)
    assert set(api.__all__) <= set(namespace)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"anybatch has no 'Updater'; it has .* Update,"):
        _ = anybatch.Updater


def test_importing_anybatch_loads_no_torch_and_its_names_load_nothing_beyond_torch():
    code = (
        "import sys, anybatch; assert 'torch' not in sys.modules; import torch; before = set(sys.modules);"
        "from anybatch import *; print(*sorted(name.split('.')[0] for name in set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {"anybatch", "torch", "__future__", "inspect", "resource"}


def test_arrows_point_down():
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        allowed = {"errors", "records", "report"} if room == "report" else set(ROOMS[: ROOMS.index(room) + 1])
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                if module.startswith("anybatch.") and (path.name, module) not in WORDS:
                    assert module.split(".")[1] in allowed, f"{path.name} imports {module}"
