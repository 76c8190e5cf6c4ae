"""Write the lessons as one self-contained page, or as a folder of files for a server."""

import html
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

from anybatch.app.lessons.pages.lesson_content import ORDER, Lesson, all_lessons, inline, read_lesson
from anybatch.app.lessons.pages.lesson_parts import part_html

Link = Callable[[str], str]
"""Returns the address of a lesson; empty if it is not on the page."""
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
"""Hides all lessons but that of the address before the first layout; without scripts all nine are shown."""


def learn_page(name: str | None = None) -> str:
    """Return one self-contained page of all nine lessons, or of the one named."""
    lessons = all_lessons() if name is None else (read_lesson(name),)
    style = "\n".join(line.strip() for line in web_file("style.css").splitlines() if line.strip())
    return _shell(
        lessons,
        style=f"<style>{style}</style>",
        imports=inline_import_map(),
        link=(lambda other: f"#{other}") if name is None else (lambda other: ""),
        title=TITLE if name is None else f"{lessons[0].title} · {TITLE}",
    )


def write_learn_site(folder: Path) -> Path:
    """Write a page per lesson, the scripts and the style into a folder, and return the first page."""
    for path, source in _modules().values():
        target = folder / "web" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source, encoding="utf-8")
    (folder / "web" / "style.css").write_text(web_file("style.css"), encoding="utf-8")
    imports = json.dumps({"imports": {name: f"./web/{path}" for name, (path, _) in _modules().items()}})

    def write(name: str, lessons: tuple[Lesson, ...], link: Link, title: str) -> Path:
        style = '<link rel="stylesheet" href="web/style.css">'
        page = folder / f"{name}.html"
        page.write_text(_shell(lessons, style=style, imports=imports, link=link, title=title), encoding="utf-8")
        return page

    for lesson in all_lessons():
        write(lesson.name, (lesson,), lambda other: f"{other}.html", f"{lesson.title} · {TITLE}")
    return write("index", all_lessons(), lambda other: f"#{other}", TITLE)


def _shell(lessons: tuple[Lesson, ...], *, style: str, imports: str, link: Link, title: str) -> str:
    return SHELL.format(
        title=html.escape(title),
        style=style,
        early=EARLY.replace("NAMES", json.dumps([lesson.name for lesson in lessons])),
        imports=imports,
        links="".join(_link(other, link(other.name)) for other in all_lessons()),
        articles="".join(_article(lesson, link) for lesson in lessons),
        home=link("trace") or "#main",
        name=TITLE,
    )


def _link(lesson: Lesson, address: str) -> str:
    """Link to a lesson, or name the command that shows it if it has no address."""
    if address:
        return f'<li><a href="{address}" data-page="{lesson.name}">{html.escape(lesson.title)}</a></li>'
    return f"<li><span><code>anybatch learn {lesson.name}</code></span></li>"


def _article(lesson: Lesson, link: Link) -> str:
    number = ORDER.index(lesson.name) + 1
    parts = "".join(part_html(part, lesson, place) for place, part in enumerate(lesson.parts))
    after = ORDER[number] if number < len(ORDER) else ""
    onward = ""
    if after and link(after):
        onward = f'<p class="next"><a href="{link(after)}">Next: {html.escape(read_lesson(after).title)}</a></p>'
    return (
        f'<article class="lesson" id="{lesson.name}" aria-labelledby="{lesson.name}-title">'
        f'<p class="kicker">{number} of {len(ORDER)} · about {lesson.minutes} minutes</p>'
        f'<h2 id="{lesson.name}-title" tabindex="-1">{html.escape(lesson.title)}</h2>'
        f'<p class="lead">{inline(lesson.lead, lesson.claims)}</p>{parts}'
        '<aside class="insight" aria-label="In one sentence">'
        f"<p>{inline(lesson.insight, lesson.claims)}</p></aside>{onward}</article>"
    )


ESCAPES = {"%": "%25", "\n": "%0A", "\t": "%09", "#": "%23", "<": "%3C", '"': "%22", "\\": "%5C"}
"""Characters with a meaning in a `data:` address, a JSON string or a script element."""


def web_file(name: str) -> str:
    """Return the text of a file in `lessons/web/`."""
    return files("anybatch.app.lessons").joinpath("web", *name.split("/")).read_text("utf-8")


@cache
def _modules() -> dict[str, tuple[str, str]]:
    """Return path below `web/` and source of each module by its import name: `ab/run` is `run.js` in any folder."""
    root = files("anybatch.app.lessons").joinpath("web")
    folders = sorted((folder for folder in root.iterdir() if folder.is_dir()), key=lambda folder: folder.name)
    return {
        f"ab/{file.name.removesuffix('.js')}": (f"{folder.name}/{file.name}", file.read_text("utf-8"))
        for folder in folders
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".js")
    }


def inline_import_map() -> str:
    """Return the JSON of an import map with all modules, safe inside a script element.

    >>> "%3C" in inline_import_map(), "<" in inline_import_map()
    (True, False)
    """
    return json.dumps({"imports": {name: _address(source) for name, (_, source) in _modules().items()}})


def _address(source: str) -> str:
    """Return a module as a `data:` address, without indentation and comment lines."""
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("//"))
    return "data:text/javascript;charset=utf-8," + "".join(ESCAPES.get(letter, letter) for letter in text)
