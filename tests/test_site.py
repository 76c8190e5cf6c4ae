"""The site of the docs: built with warnings as errors, every name in the reference, no link that leads nowhere."""

import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import anybatch
from anybatch.app.lessons.pages.lesson_content import ORDER
from tests.browsing import violations

ROOT = Path(__file__).parent.parent
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN_ON_THE_SITE = {"changelog.md", "lessons/index.html", *(f"lessons/{name}.html" for name in ORDER)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Strict: a warning of mkdocs, mkdocstrings or a link that leads nowhere ends the build."""
    folder = tmp_path_factory.mktemp("site")
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    try:
        build(config)
        yield folder
    finally:
        config.plugins.run_event("shutdown")


def test_the_site_has_every_page_and_the_lessons(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20
    for page in [*pages, Path("changelog.html"), Path("lessons/units.html")]:
        assert (site / page).is_file(), page


def test_every_public_name_is_in_the_reference_with_an_example_that_runs(site):
    """Examples in docstrings run as doctests; those below one or more names on the page in tests/test_docs.py."""
    shown = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert [name for name in anybatch.__all__ if f' id="anybatch.{name}"' not in shown] == []
    written = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    groups = re.findall(r"((?:^::: anybatch\.\w+\n\n)+)```python", written, re.MULTILINE)
    exemplified = {name for group in groups for name in re.findall(r"anybatch\.(\w+)", group)}
    words = {name: inspect.getdoc(getattr(anybatch, name)) or "" for name in anybatch.__all__}
    assert [name for name in anybatch.__all__ if ">>> " not in words[name] and name not in exemplified] == []


def test_no_relative_link_leads_nowhere():
    missing = [
        f"{text.relative_to(ROOT)}: {target}"
        for text in TEXTS
        for target in re.findall(
            r"\]\((?!https?:|#)([^)#\s]+)", re.sub(r"```.*?```", "", text.read_text(), flags=re.DOTALL)
        )
        if not (text.parent / target).exists() and target not in WRITTEN_ON_THE_SITE
    ]
    assert not missing


def test_words_are_spelt():
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *map(str, TEXTS), str(ROOT / "src"), "--skip=*.js,*.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_codespell_would_have_seen_a_word_that_is_not(tmp_path):
    (tmp_path / "page.md").write_text("the " + "recieved gradient")
    assert subprocess.run([sys.executable, "-m", "codespell_lib", str(tmp_path)], capture_output=True).returncode != 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "loop", "exactness", "benchmarks/exactness", "reference/updates"])
def test_a_page_can_be_read_by_all_and_asks_nobody(site, browser, name, scheme):
    page = browser.new_page(color_scheme=scheme, viewport={"width": 375, "height": 800})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / f"{name}.html").as_uri())
    found = violations(page, "document.querySelector('article')")
    page.close()
    assert [rule["id"] for rule in found] == []
    assert all(url.startswith("file:") for url in asked)
