"""What the lessons cost a browser: processor time until the page is ready, and of one redraw of every widget with a slider.

python -m benchmarks.learn_pages
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from anybatch.lessons.pages import ORDER, learn_page

CHROMIUM = "/usr/bin/chromium"
TURNS = 5
READY, REDRAW = 150, 50
"""Milliseconds that each may take."""
MOVE = """(slider) => {
    slider.value = Number(slider.value) === Number(slider.max) ? slider.min : Number(slider.value) + Number(slider.step || 1);
    slider.dispatchEvent(new Event("input", { bubbles: true }));
}"""


def main() -> None:
    """A line for each lesson."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "learn.html"
        path.write_text(learn_page(), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name in ORDER:
            ready = statistics.median(_ready(browser, f"{path.as_uri()}#{name}") for _ in range(TURNS))
            redraws = _redraws(browser, f"{path.as_uri()}#{name}")
            worst = f"{max(redraws):5.0f} ms at most for one of {len(redraws)} sliders" if redraws else "no slider"
            print(f"{name:<8} ready {ready:5.0f} ms (allowed {READY}), redraw {worst} (allowed {REDRAW})")
        browser.close()


def _busy(session: Any) -> float:
    """Milliseconds that the page's main thread has worked."""
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return 1e3 * float(found["TaskDuration"])


def _opened(browser: Any, address: str, script: str = "") -> tuple[Any, Any]:
    page = browser.new_page()
    page.add_init_script(script)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(address)
    page.wait_for_selector("html[data-ready]", state="attached")
    return page, session


def _ready(browser: Any, address: str) -> float:
    """Up to the mark, and no further: what waits until the browser is idle would run into the reading."""
    page, session = _opened(browser, address, "window.requestIdleCallback = () => {}")
    spent = _busy(session)
    page.close()
    return spent


def _redraws(browser: Any, address: str) -> list[float]:
    page, session = _opened(browser, address)
    page.wait_for_selector("article[data-settled]", state="attached")
    found = []
    for slider in page.query_selector_all("article:not([hidden]) input[type=range]"):
        turns = []
        for _ in range(TURNS):
            before = _busy(session)
            slider.evaluate(MOVE)
            turns.append(_busy(session) - before)
        found.append(statistics.median(turns))
    page.close()
    return found


if __name__ == "__main__":
    main()
