"""The Python in docs/ragged.md, docs/dealing.md and docs/verify.md runs, and prints what is written below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["ragged.md", "dealing.md", "verify.md"])
def test_the_examples_print_what_the_page_says(page):
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert examples
    for code, printed in examples:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, page, "exec"), names)
        assert output.getvalue() == printed
