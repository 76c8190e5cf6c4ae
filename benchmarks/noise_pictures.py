"""The picture of `benchmarks.noise`: what was predicted, and what was."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

CELL, TALL, ACROSS = 300, 230, 3
PREDICTED, MEASURED, FITTED = "#1a7f5a", "#c2410c", "#9a9a9a"
NAMES = {"linear": "linear, digits", "mlp": "MLP, digits", "text": "transformer, text"}


def advice_picture(held: Mapping[str, Any]) -> str:
    """A chart per model and optimizer: updates to a loss over the batch, both logarithmic."""
    cases = {key: value for key, value in held.items() if isinstance(value, dict) and "fitted" in value}
    width, height = ACROSS * CELL + 20, -(-len(cases) // ACROSS) * TALL + 70
    order = sorted(cases, key=lambda key: (key.split(", ")[1] != "sgd", list(NAMES).index(key.split(", ")[0])))
    charts = [
        _chart(key, cases[key], 10 + index % ACROSS * CELL, 60 + index // ACROSS * TALL)
        for index, key in enumerate(order)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            "<style>text{font:11px system-ui,sans-serif;fill:#222}.case{font-weight:600;font-size:13px}</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            '<text x="12" y="20" class="case">Updates to a loss by batch size, at the best learning rate of each</text>',
            f'<text x="12" y="38"><tspan fill="{MEASURED}">dots</tspan>: measured; <tspan fill="{PREDICTED}">line</tspan>: '
            "predicted from the noise scale of the run at the ringed dot, through it; "
            f'<tspan fill="{FITTED}">dashes</tspan>: the curve nearest to the dots</text>',
            *charts,
            "</svg>\n",
        ]
    )


def _chart(key: str, case: Mapping[str, Any], left: float, top: float) -> str:
    name, optimizer = key.split(", ")
    batches = sorted(int(batch) for batch in case["batches"])
    dots = {batch: float(case["batches"][str(batch)]["updates"]) for batch in batches}
    asked = int(case["asked"])
    least = dots[asked] / (1 + case["noise"] / asked)
    nearest = math.exp(sum(math.log(dots[b] / (1 + case["fitted"] / b)) for b in batches) / len(batches))
    curves = {
        PREDICTED: [least * (1 + case["noise"] / batch) for batch in batches],
        FITTED: [nearest * (1 + case["fitted"] / batch) for batch in batches],
    }
    values = [*dots.values(), *curves[PREDICTED], *curves[FITTED]]
    low, high = math.log(min(values)) - 0.15, math.log(max(values)) + 0.35
    x0, y0, wide, tall = left + 46, top + 168, CELL - 66, 140

    def x(batch: float) -> float:
        return x0 + wide * math.log(batch / batches[0]) / math.log(batches[-1] / batches[0])

    def y(updates: float) -> float:
        return y0 - tall * (math.log(updates) - low) / (high - low)

    def line(colour: str, ys: Sequence[float], dash: str) -> str:
        points = " ".join(f"{x(batch):.1f},{y(value):.1f}" for batch, value in zip(batches, ys, strict=True))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'

    title = f"{NAMES[name]}, {'SGD' if optimizer == 'sgd' else 'Adam'}"
    marks = [value for power in range(6) for value in (10.0**power, 3 * 10.0**power) if low < math.log(value) < high]
    return "\n".join(
        [
            f'<text x="{left + 4}" y="{top + 10}" class="case">{escape(title)}</text>',
            f'<text x="{left + 4}" y="{top + 24}">noise scale {case["noise"]:.0f}, nearest curve {case["fitted"]:.0f}</text>',
            f'<line x1="{x0}" y1="{y0}" x2="{x0 + wide}" y2="{y0}" stroke="#bbb"/>',
            *(
                f'<text x="{x0 - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>'
                f'<line x1="{x0}" y1="{y(value):.1f}" x2="{x0 + wide}" y2="{y(value):.1f}" stroke="#eee"/>'
                for value in marks
            ),
            *(f'<text x="{x(batch):.1f}" y="{y0 + 14}" text-anchor="middle">{batch}</text>' for batch in batches),
            line(FITTED, curves[FITTED], "4 3"),
            line(PREDICTED, curves[PREDICTED], "none"),
            *(f'<circle cx="{x(b):.1f}" cy="{y(dots[b]):.1f}" r="3.5" fill="{MEASURED}"/>' for b in batches),
            f'<circle cx="{x(asked):.1f}" cy="{y(dots[asked]):.1f}" r="7" fill="none" stroke="{MEASURED}"/>',
        ]
    )
