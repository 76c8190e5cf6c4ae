"""Read the lessons: one TOML file each, with its texts, its widgets and every number that it claims."""

import html
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from anybatch.display import did_you_mean
from anybatch.errors import LessonError

ORDER = ("trace", "zero", "rows", "units", "memory", "rate", "limits", "write", "recall")
"""The nine lessons in reading order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Number of a lesson: how it is measured, in which setting, and how the page shows it."""

    shown: str
    measure: str
    setting: dict[str, Any] = field(default_factory=dict)
    """Differences from the default: 1,000 rows, 4 micro-batches of 16, SGD at 0.1, 10 epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonPart:
    """Part of a lesson: a text, or a widget with its parameters."""

    kind: str
    title: str
    text: str
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One lesson."""

    name: str
    title: str
    lead: str
    insight: str
    minutes: int
    answers: tuple[str, ...]
    """Numbers of the questions that this lesson answers."""
    parts: tuple[LessonPart, ...]
    claims: dict[str, Claim]


@cache
def read_lesson(name: str) -> Lesson:
    """Return the lesson of that name."""
    if name not in ORDER:
        hint = did_you_mean(name, ORDER) or "."
        raise LessonError(f"there is no lesson {name!r}. The lessons are {', '.join(ORDER)}{hint}")
    raw = _toml(name)
    parts = tuple(
        LessonPart(kind=part.pop("kind"), title=part.pop("title", ""), text=part.pop("text", ""), spec=part)
        for part in raw["part"]
    )
    claims = {
        key: Claim(shown=fields.pop("shown"), measure=fields.pop("measure"), setting=fields)
        for key, fields in raw.get("claims", {}).items()
    }
    words = {key: raw[key] for key in ("title", "lead", "insight", "minutes")}
    return Lesson(name=name, answers=tuple(raw["answers"]), parts=parts, claims=claims, **words)


def all_lessons() -> tuple[Lesson, ...]:
    """Return the nine lessons in reading order."""
    return tuple(read_lesson(name) for name in ORDER)


def memory_table() -> dict[str, Any]:
    """Return the output of `anybatch plan stdlib` that the lesson shows; a test compares it with a new one."""
    return _toml("memory_table")


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads(files("anybatch.app.lessons").joinpath("content", f"{name}.toml").read_text("utf-8"))


def to_html(text: str, claims: Mapping[str, Claim]) -> str:
    """Convert blocks between empty lines to HTML: four spaces are code, dashes a list, a tag is copied.

    >>> to_html("It *adds*.\\n\\n- `one`\\n- two", {})
    '<p>It <em>adds</em>.</p><ul><li><code>one</code></li><li>two</li></ul>'
    """
    return "".join(_block(block, claims) for block in re.split(r"\n\s*\n", text.strip("\n")) if block.strip())


def inline(text: str, claims: Mapping[str, Claim]) -> str:
    """Convert one line to HTML: code, emphasis, links and claims.

    >>> inline("{lost} of **1,000** rows", {"lost": Claim(shown="752", measure="lost")})
    '<data data-claim="lost" value="752">752</data> of <strong>1,000</strong> rows'
    """
    return "".join(
        f"<code>{html.escape(piece[1:-1])}</code>" if piece.startswith("`") else _prose(piece, claims)
        for piece in re.split(r"(`[^`]+`)", text)
    )


def _block(block: str, claims: Mapping[str, Claim]) -> str:
    lines = block.split("\n")
    if block.startswith("<"):
        return _numbers(block, claims)
    if all(line.startswith("    ") for line in lines):
        code = "\n".join(line[4:] for line in lines)
        return f'<pre tabindex="0"><code>{html.escape(code)}</code></pre>'
    if lines[0].startswith("- "):
        items = re.split(r"\n- ", block[2:])
        return "<ul>" + "".join(f"<li>{inline(' '.join(item.split()), claims)}</li>" for item in items) + "</ul>"
    if lines[0].startswith("### "):
        return f"<h3>{inline(lines[0][4:], claims)}</h3>"
    return f"<p>{inline(' '.join(block.split()), claims)}</p>"


def _prose(piece: str, claims: Mapping[str, Claim]) -> str:
    text = html.escape(piece, quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\*(.+?)\*", r"<em>\1</em>", text)
    text = re.sub(r"\[(.+?)\]\((#\w+)\)", r'<a href="\2">\1</a>', text)
    return _numbers(text, claims)


def _numbers(text: str, claims: Mapping[str, Claim]) -> str:
    def number(found: re.Match[str]) -> str:
        shown = html.escape(claims[found[1]].shown)
        return f'<data data-claim="{found[1]}" value="{shown}">{shown}</data>'

    return re.sub(r"\{(\w+)\}", number, text)
