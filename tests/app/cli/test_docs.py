import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from anybatch import Update, supervised
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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_other_blocks_of_the_page_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    update = Update(model, optimizer, supervised(nn.MSELoss()), micro_batch=2)
    loader = StatefulDataLoader(TensorDataset(torch.randn(4, 3), torch.randn(4, 1)), batch_size=4)
    for batch in loader:
        update(batch)
    names = {"optimizer": optimizer, "update": update, "loader": loader, "update_number": 1}
    for block in blocks[1:]:
        exec(block, names)
    assert optimizer.param_groups[0]["initial_lr"] == 4e-3
    assert (names["resumed"].number, names["resumed"].progress) == (1, {"epoch": 3})
