"""Parts of a lesson as HTML: texts, widgets, and the static stand-in of each widget for a page without scripts."""

import html
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from anybatch.app.lessons.pages.lesson_content import Claim, Lesson, LessonPart, inline, memory_table, to_html
from anybatch.display import show_bytes

Claims = Mapping[str, Claim]
Spec = Mapping[str, Any]
_STATIC = {"static", "static_shows", "solution", "blocks"}
"""Keys of a spec that only the stand-in uses."""
_TEXTS = {"question", "options", "reveal", "says", "front", "back", "explain", "concepts", "about", "hints"}
LOW, HIGH = -12, 6
"""Powers of ten at the ends of the number line of fp16."""
SMALLEST, FEWER_DIGITS, LARGEST = 2**-25, 6.1e-5, 65504.0
GRADIENT, SCALES = 1e-8, (0, 8, 16, 24, 48)
RANKS, PASSES = 4, 4


def part_html(part: LessonPart, lesson: Lesson, number: int) -> str:
    """Return the HTML of a part: its text, then its widget."""
    claims = lesson.claims
    title = f"<h3>{inline(part.title, claims)}</h3>" if part.title else ""
    words = to_html(part.text, claims)
    if part.kind == "words":
        return f"<section>{title}{words}</section>"
    spec = {key: _rendered(key, value, claims) for key, value in part.spec.items() if key not in _STATIC}
    if part.kind == "memory":
        spec["table"] = memory_table()
    data = html.escape(json.dumps(spec, ensure_ascii=False, separators=(",", ":")), quote=True)
    name = f"{lesson.name}-{part.kind}-{number}"
    stand_in = _STAND_INS.get(part.kind, _nothing)(part.spec, claims)
    figure = f'<figure class="widget {part.kind}" id="{name}" data-widget="{part.kind}" data-spec="{data}">{stand_in}</figure>'
    return f"<section>{title}{words}{figure}</section>"


def _rendered(key: str, value: Any, claims: Claims) -> Any:
    """Convert the texts of a spec to HTML, so that the scripts need no mark-up of their own."""
    if isinstance(value, dict):
        return {name: _rendered(name, inner, claims) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rendered(key, inner, claims) for inner in value]
    return inline(value, claims) if isinstance(value, str) and key in _TEXTS else value


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; its cells are HTML already."""
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{caption}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _bar(share: float) -> str:
    return f'<span class="bar" style="width:{100 * share:.0f}%"></span>'


def _stepper(spec: Spec, claims: Claims) -> str:
    """Show the loop, its seven stages with their shapes, and the micro-batches of the update."""
    micro, every = spec["setting"]["micro"], spec["setting"]["every"]
    stages = (
        ("load", f"1,000 &times; 10 → {micro} &times; 10", "every micro-batch"),
        ("forward", f"{micro} &times; 10 → {micro} &times; 2", "every micro-batch"),
        ("loss", f"{micro} &times; 2 → 1", "every micro-batch"),
        ("backward", "1 → 2 &times; 10 and 2", "every micro-batch"),
        ("accumulate", "2 &times; 10 + 2 &times; 10 → 2 &times; 10", "every micro-batch"),
        ("step", "2 &times; 10 and 2 &times; 10 → 2 &times; 10", f"once for all {micro * every} rows"),
        ("zero", "2 &times; 10 → nothing", f"once for all {micro * every} rows"),
    )
    passes = "".join(
        f'<span class="pass">{k + 1}: {micro} rows</span><span class="nosync"></span>' for k in range(every)
    )
    lane = f'<li><span class="name">update 1</span>{passes}<span class="step">step, zero</span></li>'
    return (
        f'{_code(spec["setting"]["text"])}<ul class="lanes" aria-hidden="true">{lane}</ul>'
        f"{_table('One update, stage by stage', ('stage', 'in → out', 'how often'), stages)}"
    )


def _arms(spec: Spec, claims: Claims) -> str:
    """Show a bar for each way of training, from the claims about it."""
    found = [(inline(name, claims), inline(shown, claims)) for name, shown in spec["static"]]
    sizes = [float((re.search(r"[\d.]+", re.sub(r"<[^>]*>", "", shown)) or ["0"])[0]) for _, shown in found]
    rows = [(name, shown, _bar(size / max(sizes))) for (name, shown), size in zip(found, sizes, strict=True)]
    shows = str(spec.get("static_shows", spec.get("shows", "accuracy")))
    return _table("One seed", ("training", shows, "as a bar"), rows)


def shares(spec: Spec, claims: Claims) -> str:
    """Show the first split of the rows, and the weights that dividing by N gives them."""
    units, total = spec["units"], sum(spec["units"])
    bounds = [0, *sorted(set(spec["cuts"])), len(units)]
    parts = [units[first:last] for first, last in pairwise(bounds)]
    bars, rows = "", []
    for place, part in enumerate(parts, start=1):
        cells = "".join(f'<span style="flex:{one}"></span>' for one in part)
        bars += f'<div style="flex:{sum(part)}">{cells}</div>'
        share = f"{sum(part)}/{total} = {sum(part) / total:.3f}"
        factor = f"&times; {total / (len(parts) * sum(part)):.2f}"
        rows.append((str(place), str(len(part)), str(sum(part)), share, f"{1 / len(parts):.3f}", factor))
    head = ("micro-batch", "rows", spec["unit"], "its share", "divided by N", f"so each of its {spec['unit']} counts")
    caption = f"{total} {spec['unit']} in {len(units)} rows, cut into {len(parts)}"
    return f'<div class="cutbar" aria-hidden="true">{bars}</div>{_table(caption, head, rows)}'


def fp16(value: float) -> float:
    """Round a number to half precision.

    >>> fp16(1e-8), fp16(1e6), fp16(0.1)
    (0.0, inf, 0.0999755859375)
    """
    try:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _scaler(spec: Spec, claims: Claims) -> str:
    """Show a small gradient on the number line of fp16, under several loss scales."""

    def place(value: float) -> float:
        return min(100.0, max(0.0, (math.log10(value) - LOW) / (HIGH - LOW) * 100))

    ends = [("lost", 0.0, place(SMALLEST), "0"), ("torn", place(SMALLEST), place(FEWER_DIGITS), "few digits")]
    ends += [("good", place(FEWER_DIGITS), place(LARGEST), "fp16"), ("over", place(LARGEST), 100.0, "inf")]
    line = "".join(
        f'<span class="zone {kind}" style="left:{first:.1f}%;width:{last - first:.1f}%">{word}</span>'
        for kind, first, last, word in ends
    )
    rows = []
    for power in SCALES:
        scaled = GRADIENT * 2**power
        line += f'<span class="mark{" bare" if not power else ""}" style="left:{place(scaled):.1f}%"></span>'
        held = fp16(scaled)
        back = f"{held / 2**power:.3g}" if math.isfinite(held) else "the update is skipped"
        rows.append((f"2<sup>{power}</sup>", f"{scaled:.3g}", f"{held:.4g}", back))
    head = ("loss scale", "gradient &times; scale", "held in fp16 as", "unscaled")
    caption = f"A gradient of {GRADIENT:g} under several loss scales"
    return f'<div class="numberline" aria-hidden="true">{line}</div>{_table(caption, head, rows)}'


def _ranks(spec: Spec, claims: Claims) -> str:
    """Show ranks that synchronise once, in the last backward pass of an update."""
    one = '<span class="pass">F B</span><span class="nosync"></span>'
    last = '<span class="pass">F B</span><span class="sync">Σ</span><span class="step">step</span>'
    lanes = "".join(
        f'<li><span class="name">rank {rank}</span>{one * (PASSES - 1)}{last}</li>' for rank in range(RANKS)
    )
    return (
        f'<ul class="lanes" aria-hidden="true">{lanes}</ul><p><strong>1 synchronisation an update</strong> (Σ), in the last '
        f"backward (B) of {PASSES}: the same gradient, and {PASSES} times less sent than after every micro-batch.</p>"
    )


def _ward(spec: Spec, claims: Claims) -> str:
    """Show the broken loops, to be repaired on paper."""
    return "".join(
        f"<p><strong>{place}. {inline(case['says'], claims)}</strong></p>{_code(chr(10).join(case['lines']))}"
        for place, case in enumerate(spec["cases"], start=1)
    )


def _nothing(spec: Spec, claims: Claims) -> str:
    return '<p class="quiet">Here is an experiment to run, where JavaScript is on.</p>'


def _code(text: str) -> str:
    return f"<pre><code>{html.escape(text)}</code></pre>"


def _question(spec: Spec, options: Sequence[str], answer: str, claims: Claims) -> str:
    asked = f'<p class="question">{inline(spec["question"], claims)}</p>'
    listed = f'<ol type="a">{_items(options)}</ol>' if options else ""
    summary = "The answer" if options else "What an answer should hold"
    return f"{asked}{listed}<details><summary>{summary}</summary>{answer}</details>"


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{text}</li>" for text in texts)


def _predict(spec: Spec, claims: Claims) -> str:
    options = [inline(option, claims) for option in spec["options"]]
    answer = f"<p><strong>{options[spec['answer']]}</strong></p>{to_html(spec['reveal'], claims)}"
    return _question(spec, options, answer, claims)


def _quiz(spec: Spec, claims: Claims) -> str:
    parts = []
    for question in spec["questions"]:
        options = [inline(option["says"], claims) for option in question["choices"]]
        right = " ".join(
            f"{inline(option['says'], claims)} {inline(option.get('explain', ''), claims)}"
            for option in question["choices"]
            if option.get("right")
        )
        parts.append(_question(question, options, f"<p>{right}</p>", claims))
    return "".join(parts)


def _cards(spec: Spec, claims: Claims) -> str:
    return "".join(
        f"<details><summary>{inline(card['front'], claims)}</summary><p>{inline(card['back'], claims)}</p></details>"
        for card in spec["cards"]
    )


def _explain(spec: Spec, claims: Claims) -> str:
    def answer(task: Spec) -> str:
        return f"<ul>{_items([inline(concept, claims) for concept in task['concepts']])}</ul>"

    return "".join(_question(task, (), answer(task), claims) for task in spec["tasks"])


def _memory(spec: Spec, claims: Claims) -> str:
    sizes = memory_table()["sizes"]
    most = max(size["peak"] for size in sizes)
    rows = [(f"{size['size']:,}", show_bytes(size["peak"]), _bar(size["peak"] / most)) for size in sizes]
    return _table("Peak memory of one update, by what one pass holds", ("tokens in a pass", "peak", "as a bar"), rows)


def _bench(spec: Spec, claims: Claims) -> str:
    rows = [(inline(title, claims), inline(found, claims)) for title, found in spec["static"]]
    return _table("What the experiment shows", ("the loop", "what it does"), rows)


def _cheat(spec: Spec, claims: Claims) -> str:
    blocks = "".join(
        f"<section><h4>{inline(block['about'], claims)}</h4>{to_html(block['body'], claims)}</section>"
        for block in spec["blocks"]
    )
    return f'<div class="sheet">{blocks}</div>'


_STAND_INS: dict[str, Callable[[Spec, Claims], str]] = {
    "predict": _predict,
    "quiz": _quiz,
    "cards": _cards,
    "explain": _explain,
    "memory": _memory,
    "bench": _bench,
    "parsons": lambda spec, claims: _code(spec["solution"]),
    "cheat": _cheat,
    "stepper": _stepper,
    "arms": _arms,
    "walk": _arms,
    "shares": shares,
    "scaler": _scaler,
    "ranks": _ranks,
    "ward": _ward,
}
