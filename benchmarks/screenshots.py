"""The screenshots of README and docs, taken again from pages made here and now.

python -m benchmarks.screenshots
"""

import tempfile
from pathlib import Path
from typing import Any

from anybatch.app.cli.main import run
from anybatch.app.lessons.pages.lesson_page import learn_page

CHROMIUM = "/usr/bin/chromium"
PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
BROKEN = """
import torch
from torch import nn
from anybatch import Objective, Task

def task():
    torch.manual_seed(0)
    lengths = torch.randint(1, 13, (64,))
    tokens = torch.randint(1, 50, (64, 12)) * (torch.arange(12) < lengths[:, None])
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), ignore_index=0)
    return Task(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        objective=Objective(loss, units=lambda batch: len(batch[0])),
        training=torch.utils.data.TensorDataset(tokens),
        validation=torch.utils.data.TensorDataset(tokens),
        batch_size=64,
        micro_batch=16,
        epochs=1,
    )
"""
"""Counts rows where its loss divides by tokens."""


def main() -> None:
    """Every picture in turn."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1000, "height": 900}, device_scale_factor=1.25)
        _lessons(context, folder)
        context.close()
        context = browser.new_context(viewport={"width": 1100, "height": 1060}, device_scale_factor=1.5)
        _reports(context, folder)
        browser.close()


def _lessons(context: Any, folder: Path) -> None:
    path = folder / "learn.html"
    path.write_text(learn_page(), encoding="utf-8")

    def opened(lesson: str, widget: str) -> Any:
        page = context.new_page()
        page.goto(f"{path.as_uri()}#{lesson}")
        page.wait_for_selector(f"article#{lesson}[data-settled]")
        return page.locator(f"#{lesson} .{widget}")

    stepper = opened("trace", "stepper")
    while "3 of 4 micro-batches are in" not in stepper.inner_text():
        stepper.get_by_role("button", name="Next", exact=True).click()
    _take(stepper, "learn-trace")
    bench = opened("rows", "bench")
    bench.get_by_label("zero before every micro-batch").check()
    _take(bench, "learn-rows")
    _take(opened("units", "shares"), "learn-units")


def _reports(context: Any, folder: Path) -> None:
    (folder / "sentences.py").write_text(BROKEN)
    run(["train", "digits", "--quiet", "--out", str(folder / "train")])
    run(["verify", str(folder / "sentences.py"), "--quiet", "--out", str(folder / "verify")])
    page = context.new_page()
    page.goto((folder / "train" / "report.html").as_uri())
    page.screenshot(path=PICTURES / "report-train.png")
    page.locator("#rows").scroll_into_view_if_needed()
    page.evaluate("document.querySelector('#rows').scrollIntoView()")
    page.screenshot(path=PICTURES / "report-window.png")
    page.goto((folder / "verify" / "report.html").as_uri())
    page.screenshot(path=PICTURES / "report-verify.png")


def _take(element: Any, name: str) -> None:
    element.page.mouse.move(0, 0)
    element.page.evaluate("document.activeElement?.blur()")
    element.screenshot(path=PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
