"""What a type checker sees of `import anybatch`: the public names, their types, and nothing else."""

import subprocess
import sys

USES = """\
import anybatch
from torch import nn
from torch.optim import Optimizer

def use(model: nn.Module, optimizer: Optimizer, objective: anybatch.Objective) -> None:
    update = anybatch.Update(model, optimizer, objective, micro_batch=16)
    reveal_type(update(None).applied)
    anybatch.Update(model, optimizer, objective)
    anybatch.Update(model, optimizer, objective, micro_batch=16, clip_nrom=1.0)
    anybatch.NoSuchThing
"""


def test_a_type_checker_knows_the_public_names_and_their_arguments(tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "uses.py"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    lines = {
        int(line.split(":")[1]): line
        for line in told.splitlines()
        if line.startswith("uses.py") and "defined in" not in line
    }
    assert set(lines) == {7, 8, 9, 10}, told
    assert 'Revealed type is "bool"' in lines[7] or "builtins.bool" in lines[7]
    assert 'Missing named argument "micro_batch"' in lines[8]
    assert 'Unexpected keyword argument "clip_nrom"' in lines[9]
    assert 'Module has no attribute "NoSuchThing"' in lines[10]
