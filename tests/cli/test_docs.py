import re
from pathlib import Path

from anybatch.cli.main import run
from anybatch.records import RunFolder

DOCS = Path(__file__).parents[2] / "docs" / "train.md"


def test_the_task_in_the_docs_trains(tmp_path):
    source = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[0]
    (tmp_path / "mine.py").write_text(source)
    assert run(["train", "mine.py", "--out", "out", "-q"]) == 0
    found = RunFolder(tmp_path / "out").read_run()
    assert found.plan["updates"] == 125
    assert found.summary["accuracy"] > 0.5
