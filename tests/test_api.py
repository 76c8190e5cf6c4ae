"""The public face: complete, sorted, cheap to import."""

import subprocess
import sys

import pytest

import anybatch
from anybatch import api


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
