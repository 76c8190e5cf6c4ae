"""A script under watch computes what it computes alone: weights bit for bit, its own error, its own end."""

from pathlib import Path

import pytest

from tests.doctor.watched import ZOO, run_script, watch_script
from tests.processes.forked import run_function

SAMPLE = [
    "right/textbook",
    "right/gan",
    "right/scaler",
    "right/lbfgs",
    "right/checkpointing",
    "right/sam",
    "wrong/batch_norm",
    "wrong/bf16_sum",
]
SAVE = """
import sys

torch.save([m.state_dict() for m in list(globals().values()) if isinstance(m, nn.Module)], sys.path[0])
"""


def _with_weights_saved(name: str, folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text((ZOO / f"{name}.py").read_text() + SAVE)
    return script


def weights_alone(script: str, out: str) -> None:
    import sys

    sys.path.insert(0, out)
    run_script(script)


def weights_watched(script: str, out: str, folder: str) -> int:
    import sys

    sys.path.insert(0, out)
    return watch_script(script, folder, 0, 0)


@pytest.mark.parametrize("name", SAMPLE)
def test_final_weights_are_bit_for_bit_those_without_the_doctor(name, tmp_path):
    script = _with_weights_saved(name, tmp_path)
    alone, watched = tmp_path / "alone.pt", tmp_path / "watched.pt"
    assert run_function(weights_alone, str(script), str(alone)).returncode == 0
    done = run_function(weights_watched, str(script), str(watched), str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    import torch

    one, other = torch.load(alone), torch.load(watched)
    assert one
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
