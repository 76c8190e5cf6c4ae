"""The Python in docs/ragged.md and docs/verify.md runs, and prints what is written below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["ragged.md", "verify.md"])
def test_the_first_example_of_a_page_prints_what_the_page_says(page):
    text = (DOCS / page).read_text()
    code, printed = re.search(r"```python\n(.*?)```\n```text\n(.*?)```", text, re.DOTALL).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, page, "exec"), {})
    assert output.getvalue() == printed
