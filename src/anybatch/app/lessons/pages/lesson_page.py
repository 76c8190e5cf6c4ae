"""The page: nine articles or one, with everything that they need inside; or a folder of files for a server."""

import html
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from anybatch.app.lessons.pages.lesson_content import ORDER, Lesson, all_lessons, inline, read_lesson
from anybatch.app.lessons.pages.lesson_parts import part_html

Link = Callable[[str], str]
"""The address of a lesson; empty where it is not at hand."""
TITLE = "Gradient accumulation, done by you"
SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
{style}
<script>{early}</script>
<script type="importmap">{imports}</script>
</head>
<body>
<a class="skip" href="#main">Skip to the lesson</a>
<header class="top"><h1><a href="{home}">{name}</a></h1><nav aria-label="Lessons"><ol>{links}</ol></nav></header>
<main id="main" tabindex="-1">{articles}</main>
<script type="module">import "ab/start";</script>
</body>
</html>
"""
EARLY = """{
const page = location.hash.slice(1).split("?")[0], names = NAMES, shown = names.includes(page) ? page : names[0];
const rule = document.createElement("style");
rule.id = "early";
rule.textContent = `@media screen { article.lesson:not(#${shown}) { display: none } }`;
document.head.append(rule);
}"""
"""Runs before the first layout, so that only the lesson of the address is laid out; without a script all nine are shown."""


def learn_page(name: str | None = None) -> str:
    """One self-contained page of all nine lessons, or of the one that is named."""
    lessons = all_lessons() if name is None else (read_lesson(name),)
    return _shell(
        lessons,
        style=f"<style>{_small(web_file('style.css'))}</style>",
        imports=inline_import_map(),
        link=(lambda other: f"#{other}") if name is None else (lambda other: ""),
        title=TITLE if name is None else f"{lessons[0].title} · {TITLE}",
    )


def write_learn_site(folder: Path) -> Path:
    """The same as files for a server: a page per lesson, the scripts and the style once. Returns the first page."""
    for name, path in module_paths().items():
        target = folder / "web" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(web_modules()[name], encoding="utf-8")
    (folder / "web" / "style.css").write_text(web_file("style.css"), encoding="utf-8")
    imports = json.dumps({"imports": {name: f"./web/{path}" for name, path in module_paths().items()}})
    style = '<link rel="stylesheet" href="web/style.css">'
    for lesson in all_lessons():
        page = _shell(
            (lesson,),
            style=style,
            imports=imports,
            link=lambda other: f"{other}.html",
            title=f"{lesson.title} · {TITLE}",
        )
        (folder / f"{lesson.name}.html").write_text(page, encoding="utf-8")
    first = folder / "index.html"
    everything = _shell(all_lessons(), style=style, imports=imports, link=lambda other: f"#{other}", title=TITLE)
    first.write_text(everything, encoding="utf-8")
    return first


def _shell(lessons: tuple[Lesson, ...], *, style: str, imports: str, link: Link, title: str) -> str:
    links = "".join(_link(other, link(other.name)) for other in all_lessons())
    articles = "".join(_article(lesson, link) for lesson in lessons)
    home = link("trace") or "#main"
    early = EARLY.replace("NAMES", json.dumps([lesson.name for lesson in lessons]))
    return SHELL.format(
        title=html.escape(title),
        style=style,
        early=early,
        imports=imports,
        links=links,
        articles=articles,
        home=home,
        name=TITLE,
    )


def _link(lesson: Lesson, address: str) -> str:
    """A page that stands alone names the others by the command that shows them."""
    if address:
        return f'<li><a href="{address}" data-page="{lesson.name}">{html.escape(lesson.title)}</a></li>'
    return f"<li><span><code>anybatch learn {lesson.name}</code></span></li>"


def _article(lesson: Lesson, link: Link) -> str:
    number = ORDER.index(lesson.name) + 1
    parts = "".join(part_html(part, lesson, place) for place, part in enumerate(lesson.parts))
    after = ORDER[number] if number < len(ORDER) else None
    return (
        f'<article class="lesson" id="{lesson.name}" aria-labelledby="{lesson.name}-title">'
        f'<p class="kicker">{number} of {len(ORDER)} · about {lesson.minutes} minutes</p>'
        f'<h2 id="{lesson.name}-title" tabindex="-1">{html.escape(lesson.title)}</h2>'
        f'<p class="lead">{inline(lesson.lead, lesson.claims)}</p>{parts}'
        '<aside class="insight" aria-label="In one sentence">'
        f"<p>{inline(lesson.insight, lesson.claims)}</p></aside>{_onward(after, link)}</article>"
    )


def _onward(after: str | None, link: Link) -> str:
    if after is None or not link(after):
        return ""
    return f'<p class="next"><a href="{link(after)}">Next: {html.escape(read_lesson(after).title)}</a></p>'


def _small(style: str) -> str:
    return "\n".join(line.strip() for line in style.splitlines() if line.strip())


ESCAPES = {"%": "%25", "\n": "%0A", "\t": "%09", "#": "%23", "<": "%3C", '"': "%22", "\\": "%5C"}
"""What a `data:` address, a JSON string or a script element would not leave as it is."""


def web_file(name: str) -> str:
    """The text of a file of `lessons/web/`."""
    return files("anybatch.app.lessons").joinpath("web", *name.split("/")).read_text("utf-8")


@cache
def web_modules() -> dict[str, str]:
    """The source of every module, by the name it is imported by: `ab/run` is the file `run.js`, in whichever folder."""
    return {f"ab/{path.name.removesuffix('.js')}": path.read_text("utf-8") for path in _scripts(_root())}


def module_paths() -> dict[str, str]:
    """The path of every module below `web/`, for a site that serves them as files."""
    folders = [folder for folder in _root().iterdir() if folder.is_dir()]
    return {
        f"ab/{path.name.removesuffix('.js')}": f"{folder.name}/{path.name}"
        for folder in folders
        for path in _scripts(folder)
    }


def inline_import_map() -> str:
    """JSON of an import map that holds all modules; it can stand in a script element as it is.

    >>> "%3C" in inline_import_map(), "<" in inline_import_map()
    (True, False)
    """
    return json.dumps({"imports": {name: _address(source) for name, source in web_modules().items()}})


def _root() -> Traversable:
    return files("anybatch.app.lessons").joinpath("web")


def _scripts(folder: Traversable) -> list[Traversable]:
    found: list[Traversable] = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            found += _scripts(entry)
        elif entry.name.endswith(".js"):
            found.append(entry)
    return found


def _address(source: str) -> str:
    """Lines lose their indentation and those that are comments alone: a page need not carry them."""
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("//"))
    return "data:text/javascript;charset=utf-8," + "".join(ESCAPES.get(letter, letter) for letter in text)
