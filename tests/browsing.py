"""One headless browser for all tests of a worker, and axe in it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Debian's Chromium; `make test` installs it where it is missing."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM.exists(), f"{CHROMIUM} is missing; the pages are tested in it. `make test` installs it."
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


def violations(page: Any, part: str = "document") -> list[dict[str, Any]]:
    """What axe finds wrong with a page; all that it finds right stays in the browser."""
    if not page.evaluate("'axe' in window"):  # given anew, it is compiled anew: twice the time of a second run
        from axe_playwright_python.base import AXE_SCRIPT

        page.evaluate(AXE_SCRIPT)
    found: dict[str, Any] = page.evaluate(f"axe.run({part}, {{ resultTypes: ['violations'] }})")
    return found["violations"]
