"""`anybatch learn`: the lessons as a page in the browser, a file, or a site."""

import webbrowser
from pathlib import Path
from tempfile import mkdtemp

from anybatch.cli.screen import say
from anybatch.errors import SettingsError
from anybatch.lessons import learn_page, write_learn_site


def learn_command(page: str | None, *, out: Path | None, site: Path | None, is_quiet: bool) -> int:
    """Write the page, and open it where nobody said where it should go."""
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
