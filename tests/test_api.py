"""The public names: those that a user has to know, every other that can be imported, and those that are gone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import anybatch

NAMES_TO_KNOW = (
    "Accumulator AnybatchError Coupled Doctor Fit GlobalBatches Mean Objective PerRow Rows SampleList Sum Terms Tokens Update "
    "UpdateOptions Window huggingface info_nce observed plan resume row_dropout save supervised verify windows"
)
"""Frozen: a new name needs a reason in its commit, and there are at most 30."""
OTHER_NAMES = (
    "Accumulated ArgumentsError Auto Batch BatchError Breakdown Cause CheckpointError Checkpointing Choice Cost CutResult "
    "Dealt Diagnosis DoctorError DropoutError ExactnessError Finding Fitted InfoNCE LessonError LockstepError LossError "
    "MemoryLimitError MicroBatches NoiseScale NonFiniteError ParallelError ParameterDeviation ParameterError Plan PlanError "
    "Ranks Resumed RunError Scaling SettingsError SizePeak Split SplitError Stacked Task TaskError UnitsError UpdateError "
    "UpdateResult Verdict VerifyError WindowError Windows clip_loss measure_peak num_rows repeated_rows rows scale_lr "
    "sentence_transformers stages take_rows warmup"
)
"""Names that were public once, and stay importable."""
PUBLIC, ALSO = NAMES_TO_KNOW.split(), OTHER_NAMES.split()
PACKAGE = Path(anybatch.__file__).parent


def test_every_public_name_is_imported_and_listed_in_order():
    assert anybatch.__all__ == PUBLIC
    assert len(PUBLIC) <= 30
    assert dir(anybatch) == sorted([*PUBLIC, *ALSO, "__version__"])


@pytest.mark.parametrize("name", [*PUBLIC, *ALSO])
def test_every_name_can_be_imported(name):
    namespace: dict[str, object] = {}
    exec(f"from anybatch import {name}", namespace)
    assert namespace[name] is getattr(anybatch, name)


def test_the_names_of_the_design_are_there():
    designed = (
        "Update Accumulator Window Objective supervised huggingface Coupled rows Rows Tokens Auto Fit PerRow windows "
        "MicroBatches plan verify scale_lr warmup save resume row_dropout"
    )
    assert set(designed.split()) <= set(dir(anybatch))


def test_import_star_gives_the_public_names():
    namespace: dict[str, object] = {}
    exec("from anybatch import *", namespace)
    assert {name for name in namespace if not name.startswith("__")} == set(PUBLIC)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"anybatch has no 'Updater'; it has .* Update,"):
        _ = anybatch.Updater
    assert not hasattr(anybatch, "__wrapped__")


@pytest.mark.parametrize(("name", "instead"), [("ProgressBar", "tqdm"), ("TensorBoardLogger", "SummaryWriter")])
def test_importing_a_name_that_is_gone_says_what_to_use_instead(name, instead):
    with pytest.raises(ImportError, match=rf"anybatch has no '{name}' any more\..*{instead}"):
        exec(f"from anybatch import {name}")


def test_type_checkers_are_told_every_name():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    named = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named - {"_events"} | {"stages"} == {*PUBLIC, *ALSO}
    (listed,) = [ast.literal_eval(node.value) for node in stub.body if ast.unparse(node).startswith("__all__")]  # type: ignore[attr-defined]
    assert listed == PUBLIC


def test_importing_anybatch_loads_no_torch_and_its_names_load_nothing_beyond_torch():
    code = (
        "import sys, anybatch; assert 'torch' not in sys.modules; import torch; before = set(sys.modules);"
        "[getattr(anybatch, name) for name in dir(anybatch)];"
        "print(*sorted(name.split('.')[0] for name in set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {"anybatch", "torch", "__future__", "html", "inspect", "resource"}


def test_plan_and_verify_take_the_options_of_an_update_and_keywords_win():
    import torch
    from torch import nn

    from anybatch import UpdateOptions, plan, supervised, verify

    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (torch.randn(12, 4), torch.arange(12) % 3)
    objective = supervised(nn.CrossEntropyLoss())
    assert verify(model, objective, batch, micro_batch=4, options=UpdateOptions(batch_norm="exact")).is_exact
    assert not verify(
        model, objective, batch, micro_batch=4, batch_norm="micro", options=UpdateOptions(batch_norm="exact")
    ).is_exact
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = UpdateOptions(clip_norm=1.0, batch_norm="exact")
    with pytest.raises(anybatch.UpdateError, match="are both given"):
        plan(model, optimizer, objective, batch, memory="1GiB", options=both, clip_value=1.0)
    assert plan(model, optimizer, objective, batch, memory="1GiB", options=both).fits
