"""The parts of a lesson as HTML: words, widgets, and what stands in for a widget where no script runs."""

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
"""Shown by the page without scripts alone."""
_TEXTS = {"question", "options", "reveal", "says", "front", "back", "explain", "concepts", "about", "hints"}


def _rendered(key: str, value: Any, claims: Claims) -> Any:
    if isinstance(value, dict):
        return {name: _rendered(name, inner, claims) for name, inner in value.items()}
    if isinstance(value, list):
        return [_rendered(key, inner, claims) for inner in value]
    return inline(value, claims) if isinstance(value, str) and key in _TEXTS else value


Spec = Mapping[str, Any]
LOW, HIGH = -12, 6
"""Powers of ten at the ends of the number line of fp16."""
SMALLEST, FEWER_DIGITS, LARGEST = 2**-25, 6.1e-5, 65504.0
GRADIENT, SCALES = 1e-8, (0, 8, 16, 24, 48)
RANKS, PASSES = 4, 4


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    titles = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{caption}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def stepper(spec: Spec, claims: Claims) -> str:
    """The loop, its seven stages with their shapes, and one lane for every micro-batch of the update."""
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
        f"<pre><code>{html.escape(spec['setting']['text'])}</code></pre>"
        f'<ul class="lanes" aria-hidden="true">{lane}</ul>'
        f"{table('One update, stage by stage', ('stage', 'in → out', 'how often'), stages)}"
    )


def arms(spec: Spec, claims: Claims) -> str:
    """A bar for each number that the claims have of these ways of training."""
    found = [(inline(name, claims), inline(shown, claims)) for name, shown in spec["static"]]
    sizes = [float((re.search(r"[\d.]+", re.sub(r"<[^>]*>", "", shown)) or ["0"])[0]) for _, shown in found]
    most = max(sizes)
    rows = [
        (name, shown, f'<span class="bar" style="width:{100 * size / most:.0f}%"></span>')
        for (name, shown), size in zip(found, sizes, strict=True)
    ]
    return table(
        "One seed", ("training", str(spec.get("static_shows", spec.get("shows", "accuracy"))), "as a bar"), rows
    )


def shares(spec: Spec, claims: Claims) -> str:
    """The rows as they are cut at first, and what dividing by N makes of them."""
    units, total = spec["units"], sum(spec["units"])
    bounds = [0, *sorted(set(spec["cuts"])), len(units)]
    parts = [units[first:last] for first, last in pairwise(bounds)]
    bars = "".join(
        f'<div style="flex:{sum(part)}">{"".join(f"""<span style="flex:{one}"></span>""" for one in part)}</div>'
        for part in parts
    )
    rows = [
        (
            str(place),
            str(len(part)),
            str(sum(part)),
            f"{sum(part)}/{total} = {sum(part) / total:.3f}",
            f"{1 / len(parts):.3f}",
            f"&times; {total / (len(parts) * sum(part)):.2f}",
        )
        for place, part in enumerate(parts, start=1)
    ]
    head = ("micro-batch", "rows", spec["unit"], "its share", "divided by N", f"so each of its {spec['unit']} counts")
    caption = f"{total} {spec['unit']} in {len(units)} rows, cut into {len(parts)}"
    return f'<div class="cutbar" aria-hidden="true">{bars}</div>{table(caption, head, rows)}'


def fp16(value: float) -> float:
    """What half precision holds of a number.

    >>> fp16(1e-8), fp16(1e6), fp16(0.1)
    (0.0, inf, 0.0999755859375)
    """
    try:
        return float(struct.unpack("<e", struct.pack("<e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def scaler(spec: Spec, claims: Claims) -> str:
    """A small gradient on the number line of fp16, and where loss scales move it."""
    ends = [("lost", 0.0, _place(SMALLEST), "0"), ("torn", _place(SMALLEST), _place(FEWER_DIGITS), "few digits")]
    ends += [("good", _place(FEWER_DIGITS), _place(LARGEST), "fp16"), ("over", _place(LARGEST), 100.0, "inf")]
    zones = "".join(
        f'<span class="zone {kind}" style="left:{first:.1f}%;width:{last - first:.1f}%">{word}</span>'
        for kind, first, last, word in ends
    )
    marks = "".join(
        f'<span class="mark{" bare" if not power else ""}" style="left:{_place(GRADIENT * 2**power):.1f}%"></span>'
        for power in SCALES
    )
    rows = []
    for power in SCALES:
        held = fp16(GRADIENT * 2**power)
        back = f"{held / 2**power:.3g}" if math.isfinite(held) else "the update is skipped"
        rows.append((f"2<sup>{power}</sup>", f"{GRADIENT * 2**power:.3g}", f"{held:.4g}", back))
    head = ("loss scale", "gradient &times; scale", "held in fp16 as", "unscaled")
    return (
        f'<div class="numberline" aria-hidden="true">{zones}{marks}</div>'
        f"{table(f'A gradient of {GRADIENT:g} under several loss scales', head, rows)}"
    )


def _place(value: float) -> float:
    """In percent of the number line."""
    return min(100.0, max(0.0, (math.log10(value) - LOW) / (HIGH - LOW) * 100))


def ranks(spec: Spec, claims: Claims) -> str:
    """Lanes of ranks that synchronise once, in the last backward pass of an update."""
    one = '<span class="pass">F B</span><span class="nosync"></span>'
    last = '<span class="pass">F B</span><span class="sync">Σ</span><span class="step">step</span>'
    lanes = "".join(
        f'<li><span class="name">rank {rank}</span>{one * (PASSES - 1)}{last}</li>' for rank in range(RANKS)
    )
    return (
        f'<ul class="lanes" aria-hidden="true">{lanes}</ul><p><strong>1 synchronisation an update</strong> (Σ), in the last '
        f"backward (B) of {PASSES}: the same gradient, and {PASSES} times less sent than after every micro-batch.</p>"
    )


def ward(spec: Spec, claims: Claims) -> str:
    """The broken loops, to be mended on paper."""
    return "".join(
        f"<p><strong>{place}. {inline(case['says'], claims)}</strong></p>"
        f"<pre><code>{html.escape(chr(10).join(case['lines']))}</code></pre>"
        for place, case in enumerate(spec["cases"], start=1)
    )


def _nothing(spec: Spec, claims: Claims) -> str:
    return '<p class="quiet">Here is an experiment to run, where JavaScript is on.</p>'


def _question(spec: Spec, options: str, summary: str, answer: str, claims: Claims) -> str:
    asked = f'<p class="question">{inline(spec["question"], claims)}</p>'
    return f"{asked}{options}<details><summary>{summary}</summary>{answer}</details>"


def _predict(spec: Spec, claims: Claims) -> str:
    options = [inline(option, claims) for option in spec["options"]]
    listed = "".join(f"<li>{option}</li>" for option in options)
    answer = f"<p><strong>{options[spec['answer']]}</strong></p>{to_html(spec['reveal'], claims)}"
    return _question(spec, f'<ol type="a">{listed}</ol>', "The answer", answer, claims)


def _quiz(spec: Spec, claims: Claims) -> str:
    parts = []
    for question in spec["questions"]:
        options = "".join(f"<li>{inline(option['says'], claims)}</li>" for option in question["choices"])
        right = " ".join(
            f"{inline(option['says'], claims)} {inline(option.get('explain', ''), claims)}"
            for option in question["choices"]
            if option.get("right")
        )
        parts.append(_question(question, f'<ol type="a">{options}</ol>', "The answer", f"<p>{right}</p>", claims))
    return "".join(parts)


def _cards(spec: Spec, claims: Claims) -> str:
    return "".join(
        f"<details><summary>{inline(card['front'], claims)}</summary><p>{inline(card['back'], claims)}</p></details>"
        for card in spec["cards"]
    )


def _explain(spec: Spec, claims: Claims) -> str:
    parts = []
    for task in spec["tasks"]:
        concepts = "".join(f"<li>{inline(concept, claims)}</li>" for concept in task["concepts"])
        parts.append(_question(task, "", "What an answer should hold", f"<ul>{concepts}</ul>", claims))
    return "".join(parts)


def _memory(spec: Spec, claims: Claims) -> str:
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


def _bench(spec: Spec, claims: Claims) -> str:
    """A table of the breaks that can be tried, from the claims about them."""
    rows = "".join(
        f"<tr><td>{inline(title, claims)}</td><td>{inline(found, claims)}</td></tr>" for title, found in spec["static"]
    )
    return (
        "<table><caption>What the experiment shows</caption>"
        f"<thead><tr><th>the loop</th><th>what it does</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _code(spec: Spec, claims: Claims) -> str:
    return f"<pre><code>{html.escape(spec['solution'])}</code></pre>"


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
    "parsons": _code,
    "cheat": _cheat,
    "stepper": stepper,
    "arms": arms,
    "walk": arms,
    "shares": shares,
    "scaler": scaler,
    "ranks": ranks,
    "ward": ward,
}
