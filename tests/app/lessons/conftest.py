"""The engine of the lessons in a browser, alone on a page."""

import pytest

from anybatch.app.lessons.pages.lesson_page import inline_import_map

BARE = """<!doctype html><meta charset="utf-8"><script type="importmap">{map}</script><script type="module">
const names = ["ab/run", "ab/loops", "ab/interpreter"];
window.engine = Object.assign({{}}, ...await Promise.all(names.map((name) => import(name))));
document.documentElement.dataset.ready = "";
</script>"""


@pytest.fixture(scope="session")
def engine_page(browser, tmp_path_factory):
    """Opens a page with the engine of an import map: one that `change` has changed."""
    pages = []

    def opens(change=lambda text: text):
        path = tmp_path_factory.mktemp("engine") / "engine.html"
        path.write_text(BARE.format(map=change(inline_import_map())))
        pages.append(browser.new_page())
        pages[-1].goto(path.as_uri())
        pages[-1].wait_for_selector("html[data-ready]", state="attached", timeout=600_000)
        return pages[-1]

    yield opens
    for page in pages:
        page.close()


@pytest.fixture(scope="session")
def engine(engine_page):
    """A page on which `engine.run(setting)` can be called."""
    return engine_page()
