"""Writes what torch measures into the claims of the lessons: python -m tests.app.lessons.fill_claims"""

import re
import tomllib
from pathlib import Path
from tempfile import mkdtemp

from tests.app.lessons.claims import measured

CONTENT = Path(__file__).parents[3] / "src/anybatch/app/lessons/content"

if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    from anybatch.app.lessons.pages.lesson_page import inline_import_map
    from tests.app.lessons.conftest import BARE
    from tests.browsing import CHROMIUM

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        path = Path(mkdtemp()) / "engine.html"
        path.write_text(BARE.format(map=inline_import_map()))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        for file in sorted(CONTENT.glob("*.toml")):
            text = file.read_text()
            for name, fields in tomllib.loads(text).get("claims", {}).items():
                fields = dict(fields)
                before = fields.pop("shown")
                shown = measured(page, fields.pop("measure"), fields)
                print(file.stem, name, before, "->", shown)
                text = re.sub(rf'(?m)^({name} = \{{.*shown = )".*"( \}})$', rf'\g<1>"{shown}"\g<2>', text)
            file.write_text(text)
