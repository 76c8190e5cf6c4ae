"""Without scripts every widget that draws has a picture of its first setting, with the numbers that the script would show."""

import re
from fractions import Fraction

import pytest
import torch

from anybatch.app.lessons.pages.lesson_content import all_lessons
from anybatch.app.lessons.pages.lesson_parts import fp16, part_html, shares

DRAWN = {
    "stepper": "lanes",
    "arms": "bar",
    "walk": "bar",
    "shares": "cutbar",
    "scaler": "numberline",
    "ranks": "lanes",
    "ward": "<pre>",
}
PARTS = [
    (lesson, part, place) for lesson in all_lessons() for place, part in enumerate(lesson.parts) if part.kind in DRAWN
]


def test_every_widget_that_draws_is_on_some_page():
    assert {part.kind for _, part, _ in PARTS} == set(DRAWN)


@pytest.mark.parametrize(("lesson", "part", "place"), PARTS, ids=lambda one: getattr(one, "kind", ""))
def test_a_picture_stands_where_the_script_would_draw(lesson, part, place):
    page = part_html(part, lesson, place)
    assert DRAWN[part.kind] in page
    assert "where JavaScript is on" not in page
    assert "{" not in re.sub(r'data-spec="[^"]*"', "", page)


def test_the_factors_of_shares_are_those_of_a_mean_of_means():
    units, cuts = [9, 2, 7, 1, 3], [1, 3]
    page = shares({"units": units, "cuts": cuts, "unit": "tokens"}, {})
    parts = [Fraction(9), Fraction(9), Fraction(4)]
    wanted = [f"&times; {float(sum(parts) / (3 * part)):.2f}" for part in parts]
    assert re.findall(r"&times; [\d.]+", page) == wanted
    assert len(set(wanted)) > 1  # dividing by N is not the same for all


@pytest.mark.parametrize("value", [1e-8, 2.9e-8, 3.1e-8, 6e-5, 0.1, 65519.0, 65521.0, -1e9])
def test_fp16_is_torchs(value):
    assert fp16(value) == torch.tensor(value, dtype=torch.float64).half().double().item()
