"""Commands that write a page without a run: `anybatch learn` and `anybatch self-test`."""

import json
import webbrowser
from pathlib import Path
from tempfile import mkdtemp

from anybatch import __version__
from anybatch.app.cli.folders import check_installed, new_folder, versions
from anybatch.app.cli.screen import say
from anybatch.app.lessons.pages.lesson_page import learn_page, write_learn_site
from anybatch.app.records.tolerant_reading import plain
from anybatch.display import table
from anybatch.errors import SettingsError


def learn_command(page: str | None, *, out: Path | None, site: Path | None, is_quiet: bool) -> int:
    """Write the lessons; open them in the browser unless `out` or `site` is given."""
    if site is not None:
        if page is not None or out is not None:
            given = page if page is not None else f"--out {out}"
            raise SettingsError(f"--site {site} writes all lessons into a folder; it does not go with {given}.")
        say(f"site: {write_learn_site(site)}", is_quiet=is_quiet)
        return 0
    text = learn_page(page)
    path = out or Path(mkdtemp(prefix="anybatch-learn-")) / "learn.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    say(f"page: {path}", is_quiet=is_quiet)
    if out is None:
        webbrowser.open(path.resolve().as_uri())
    return 0


def self_test_command(device: str, *, rows: int | None, out: Path | None, is_quiet: bool) -> int:
    """Run every check on the device, print a table, write a page and a JSON; return 0 if all pass, else 1."""
    check_installed()
    folder = new_folder("self-test", out).path
    say(f"anybatch {__version__}  self-test, some two minutes", is_quiet=is_quiet)
    from anybatch.app.report.doctor_page import write_self_test_page
    from anybatch.app.selftest.self_testing import Checked, run_self_test  # this loads torch
    from anybatch.app.training.experiment import find_device

    def show(check: Checked) -> None:
        say(f"{'passed' if check.has_passed else 'FAILED':6}  {check.group}: {check.name}", is_quiet=is_quiet)

    found = run_self_test(find_device(device), versions=versions(), num_rows=rows, tell=show)
    rows_of_table = [[one.name, one.found, one.wanted, "yes" if one.has_passed else "NO"] for one in found.checks]
    say("\n".join(["", *table(["check", "found", "wanted", "passed"], rows_of_table)]), is_quiet=is_quiet)
    folder.mkdir(parents=True, exist_ok=True)
    data = plain(found) | {"has_passed": found.has_passed}
    (folder / "self-test.json").write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
    page = write_self_test_page(data, folder / "self-test.html")
    verdict = "all passed" if found.has_passed else "not all passed"
    say(f"\n{found.device}: {verdict} in {found.seconds:.0f} s", is_quiet=is_quiet)
    say(f"page: {page}\nto attach to an issue: {folder / 'self-test.json'}", is_quiet=is_quiet)
    return 0 if found.has_passed else 1
