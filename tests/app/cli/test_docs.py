import re
from pathlib import Path

import torch
from torch import nn

from anybatch.app.cli.main import run
from anybatch.app.records.run_folder import RunFolder

DOCS = Path(__file__).parents[3] / "docs" / "train.md"


def test_the_task_in_the_docs_trains(tmp_path):
    source = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[0]
    (tmp_path / "mine.py").write_text(source)
    assert run(["train", "mine.py", "--out", "out", "-q"]) == 0
    found = RunFolder(tmp_path / "out").read_run()
    assert found.plan["updates"] == 125
    assert found.summary["accuracy"] > 0.5


def test_the_other_block_of_the_page_scales_the_learning_rate():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    optimizer = torch.optim.AdamW(nn.Linear(3, 1).parameters(), lr=1e-3)
    for block in blocks[1:]:
        exec(block, {"optimizer": optimizer})
    assert optimizer.param_groups[0]["initial_lr"] == 4e-3
