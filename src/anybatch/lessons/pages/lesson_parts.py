"""The parts of a page as HTML that reads without JavaScript; widgets take its place where scripts run.

Every widget is a `figure` with its kind and its spec. What stands in it says the same in words, from the same claims.
"""

import html
import json
from collections.abc import Callable, Mapping
from typing import Any

from anybatch.lessons.pages import static_pictures
from anybatch.lessons.pages.lesson_content import Claim, Lesson, LessonPart, memory_table
from anybatch.lessons.pages.words import inline, to_html
from anybatch.sizes import show_bytes

Claims = Mapping[str, Claim]


def part_html(part: LessonPart, lesson: Lesson, number: int) -> str:
    """The part; its words come before its widget."""
    claims = lesson.claims
    title = f"<h3>{inline(part.title, claims)}</h3>" if part.title else ""
    words = to_html(part.text, claims)
    if part.kind == "words":
        return f"<section>{title}{words}</section>"
    spec = _spec(part, claims)
    name = f"{lesson.name}-{part.kind}-{number}"
    stand_in = _STAND_INS.get(part.kind, _nothing)(part.spec, claims)
    data = html.escape(json.dumps(spec, ensure_ascii=False, separators=(",", ":")), quote=True)
    figure = f'<figure class="widget {part.kind}" id="{name}" data-widget="{part.kind}" data-spec="{data}">{stand_in}</figure>'
    return f"<section>{title}{words}{figure}</section>"


def _spec(part: LessonPart, claims: Claims) -> dict[str, Any]:
    """Texts of the spec as HTML, so that the scripts need no mark-up of their own."""
    made = {key: _rendered(key, value, claims) for key, value in part.spec.items() if key not in _STATIC}
    return made | {"table": memory_table()} if part.kind == "memory" else made


_STATIC = {"static", "static_shows", "solution", "blocks"}
"""What only the page without scripts shows."""
_TEXTS = {"question", "options", "reveal", "says", "front", "back", "explain", "concepts", "about", "hints"}


def _rendered(key: str, value: Any, claims: Claims) -> Any:
    if isinstance(value, dict):
        return {name: _rendered(name, inner, claims) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rendered(key, inner, claims) for inner in value]
    return inline(value, claims) if isinstance(value, str) and key in _TEXTS else value


def _nothing(spec: dict[str, Any], claims: Claims) -> str:
    return '<p class="quiet">Here is an experiment to run, where JavaScript is on.</p>'


def _predict(spec: dict[str, Any], claims: Claims) -> str:
    options = "".join(f"<li>{inline(option, claims)}</li>" for option in spec["options"])
    answer = inline(spec["options"][spec["answer"]], claims)
    return (
        f'<p class="question">{inline(spec["question"], claims)}</p><ol type="a">{options}</ol>'
        f"<details><summary>The answer</summary><p><strong>{answer}</strong></p>{to_html(spec['reveal'], claims)}</details>"
    )


def _quiz(spec: dict[str, Any], claims: Claims) -> str:
    parts = []
    for question in spec["questions"]:
        options = "".join(f"<li>{inline(option['says'], claims)}</li>" for option in question["choices"])
        right = " ".join(
            f"{inline(option['says'], claims)} {inline(option.get('explain', ''), claims)}"
            for option in question["choices"]
            if option.get("right")
        )
        parts.append(
            f'<p class="question">{inline(question["question"], claims)}</p><ol type="a">{options}</ol>'
            f"<details><summary>The answer</summary><p>{right}</p></details>"
        )
    return "".join(parts)


def _cards(spec: dict[str, Any], claims: Claims) -> str:
    return "".join(
        f"<details><summary>{inline(card['front'], claims)}</summary><p>{inline(card['back'], claims)}</p></details>"
        for card in spec["cards"]
    )


def _explain(spec: dict[str, Any], claims: Claims) -> str:
    parts = []
    for task in spec["tasks"]:
        concepts = "".join(f"<li>{inline(concept, claims)}</li>" for concept in task["concepts"])
        parts.append(
            f'<p class="question">{inline(task["question"], claims)}</p>'
            f"<details><summary>What an answer should hold</summary><ul>{concepts}</ul></details>"
        )
    return "".join(parts)


def _memory(spec: dict[str, Any], claims: Claims) -> str:
    table = memory_table()
    most = max(size["peak"] for size in table["sizes"])
    rows = "".join(
        f"<tr><td>{size['size']:,}</td><td>{show_bytes(size['peak'])}</td>"
        f'<td><span class="bar" style="width:{100 * size["peak"] / most:.0f}%"></span></td></tr>'
        for size in table["sizes"]
    )
    return (
        "<table><caption>Peak memory of one update, by what one pass holds</caption>"
        f"<thead><tr><th>tokens in a pass</th><th>peak</th><th>as a bar</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _bench(spec: dict[str, Any], claims: Claims) -> str:
    """A table of the breaks that can be tried, from the claims about them."""
    rows = "".join(
        f"<tr><td>{inline(title, claims)}</td><td>{inline(found, claims)}</td></tr>" for title, found in spec["static"]
    )
    return (
        "<table><caption>What the experiment shows</caption>"
        f"<thead><tr><th>the loop</th><th>what it does</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _code(spec: dict[str, Any], claims: Claims) -> str:
    return f"<pre><code>{html.escape(spec['solution'])}</code></pre>"


def _cheat(spec: dict[str, Any], claims: Claims) -> str:
    blocks = "".join(
        f"<section><h4>{inline(block['about'], claims)}</h4>{to_html(block['body'], claims)}</section>"
        for block in spec["blocks"]
    )
    return f'<div class="sheet">{blocks}</div>'


_STAND_INS: dict[str, Callable[[dict[str, Any], Claims], str]] = {
    "predict": _predict,
    "quiz": _quiz,
    "cards": _cards,
    "explain": _explain,
    "memory": _memory,
    "bench": _bench,
    "parsons": _code,
    "cheat": _cheat,
    "stepper": static_pictures.stepper,
    "arms": static_pictures.arms,
    "walk": static_pictures.arms,
    "shares": static_pictures.shares,
    "scaler": static_pictures.scaler,
    "ranks": static_pictures.ranks,
    "ward": static_pictures.ward,
}
