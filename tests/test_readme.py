"""The README's Python runs, in order, and prints what the README says it prints."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def test_every_python_block_runs_and_prints_what_is_written_below_it():
    blocks = BLOCK.findall(README.read_text())
    namespace: dict[str, object] = {}
    num_outputs = 0
    for index, (language, text) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, f"README block {index}", "exec"), namespace)
        if index + 1 < len(blocks) and blocks[index + 1][0] == "text":
            assert printed.getvalue() == blocks[index + 1][1]
            num_outputs += 1
    assert num_outputs == 1


def test_the_readme_names_no_command_that_the_makefile_lacks():
    makefile = (README.parent / "Makefile").read_text()
    named = set(re.findall(r"^make (\w+)|`make (\w+)`", README.read_text(), re.MULTILINE))
    assert named
    for target in ("".join(pair) for pair in named):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_is_short_and_each_question_is_one_click_from_code():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    table = text.split("## Start here")[1].split("## ")[0]
    links = [re.findall(r"\]\((docs/[\w-]+\.md)\)", line) for line in table.splitlines() if line.startswith("| **")]
    assert len(links) == 7
    for pages in links:
        assert pages
        assert all(re.search(r"```python|`anybatch \w+", (README.parent / page).read_text()) for page in pages)
