"""The Python in docs/ragged.md runs, and prints what is written below it."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "ragged.md"


def test_the_example_of_ragged_batches_prints_what_the_page_says():
    code, printed = re.search(r"```python\n(.*?)```\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "ragged.md", "exec"), {})
    assert output.getvalue() == printed
