"""Every page of docs/ prints what it says, and the errors that it quotes are those that a user gets."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.processes.ranks import on_ranks

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)
ELSEWHERE = {"train.md", "huggingface.md", "lightning.md", "accelerate.md", "loaders.md"}
"""The first is a task file, trained by tests/app/cli/test_docs.py; the others need frameworks: tests/integrations."""
PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in DOCS.rglob("*.md")
    if "```python" in path.read_text() and path.name not in ELSEWHERE
)
ON_TWO_RANKS = {"ranks.md"}
MOST_WORDS = 18_500
"""All pages but benchmarks and reference."""
WITHOUT_ERRORS = {"architecture.md", "cost.md", "examples.md", "exactness.md", "limits.md", "versions.md"}
"""Pages that explain something, and are no guide."""


def run_page(page: str) -> list[tuple[str, str]]:
    """Run the blocks of a page one after the other; return (printed, written) of each."""
    names: dict[str, object] = {}
    found = []
    for code, written in BLOCK.findall((DOCS / page).read_text()):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, page, "exec"), names)
        found.append((output.getvalue(), written))
    return found


def test_the_pages_with_examples_are_found():
    assert {"contrastive.md", "memory.md", "ranks.md", "reference/updates.md", "verify.md"} <= set(PAGES)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ON_TWO_RANKS])
def test_the_examples_print_what_the_page_says(page):
    blocks = run_page(page)
    assert any(written for _, written in blocks)
    for printed, written in blocks:
        assert printed == written


@pytest.mark.parametrize("page", sorted(ON_TWO_RANKS))
def test_the_examples_for_ranks_print_what_the_page_says_on_each(page):
    for blocks in on_ranks(2, run_page, page):
        assert blocks
        for printed, written in blocks:
            assert written
            assert printed == written


def test_the_guides_stay_short():
    texts = [path.read_text() for path in DOCS.glob("*.md")]
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS


def test_every_guide_ends_with_what_to_do_if_it_goes_wrong():
    last = {path.name: re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)[-1:] for path in DOCS.glob("*.md")}
    assert {page for page, heading in last.items() if heading != ["If it goes wrong"]} == WITHOUT_ERRORS
