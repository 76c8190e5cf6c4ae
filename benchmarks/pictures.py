"""Pictures of finished benchmarks, as SVG."""

from collections.abc import Mapping
from html import escape
from typing import Any

COLOURS = {
    "anybatch Tokens": "#1a7f5a",
    "HF Trainer, batch_rebalance": "#7a8fb8",
    "HF Trainer, group_by_length": "#a9b8d6",
    "HF Trainer": "#c9c9c9",
    "loop by hand": "#8a8a8a",
    "Accelerate": "#b0b0b0",
    "Lightning": "#d8d8d8",
}
BAR, GAP, LEFT, UNIT, WIDTH = 16, 26, 210, 120, 900


def ragged_picture(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Bars of the rate of every contender, as a multiple of the loop by hand, one group per case."""
    lines, y = [], 46
    for title, results in cases.items():
        lines.append(f'<text x="12" y="{y}" class="case">{escape(title)}</text>')
        y += 8
        for name, result in results.items():
            if name not in COLOURS:
                continue
            width = UNIT * result["speedup"]
            lines += [
                f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{LEFT}" y="{y + 1}" width="{width:.1f}" height="{BAR - 3}" fill="{COLOURS[name]}"/>',
                f'<text x="{LEFT + width + 6:.1f}" y="{y + 12}">{result["speedup"]:.2f} x, {result["waste"]:.0%} padding, '
                f"{result['peak_bytes'] / 2**20:.0f} MB</text>",
            ]
            y += BAR
        y += GAP
    one = LEFT + UNIT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">',
            "<style>text{font:11px system-ui,sans-serif;fill:#222}.case{font-weight:600;font-size:13px}</style>",
            f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
            '<text x="12" y="20" class="case">Rate on ragged batches, as a multiple of a loop by hand over 8 rows in arrival '
            "order; padding; peak of activations</text>",
            f'<line x1="{one}" y1="32" x2="{one}" y2="{y - 20}" stroke="#444" stroke-dasharray="3 3"/>',
            *lines,
            "</svg>\n",
        ]
    )


CELL, TALL, ACROSS = 290, 190, 3
PREDICTED, MEASURED = "#1a7f5a", "#c2410c"


def memory_picture(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """A small chart per case: the predicted peak as a line, what was measured as dots, over the micro-batch size."""
    width, height = ACROSS * CELL + 20, -(-len(cases) // ACROSS) * TALL + 60
    charts = [
        _peaks_chart(name, case, 10 + index % ACROSS * CELL, 50 + index // ACROSS * TALL)
        for index, (name, case) in enumerate(cases.items())
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            "<style>text{font:11px system-ui,sans-serif;fill:#222}.case{font-weight:600;font-size:13px}</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            '<text x="12" y="22" class="case">Peak memory of an update by micro-batch size: predicted before it runs '
            f'(<tspan fill="{PREDICTED}">line</tspan>), measured (<tspan fill="{MEASURED}">dots</tspan>); off at worst</text>',
            *charts,
            "</svg>\n",
        ]
    )


def _peaks_chart(name: str, case: Mapping[str, Any], left: float, top: float) -> str:
    sizes = sorted(int(size) for size in case["measured"])
    predicted, measured = ({int(size): peak for size, peak in case[key].items()} for key in ("predicted", "measured"))
    high = max([*predicted.values(), *measured.values()])
    x0, y0, wide, tall = left + 46, top + 140, CELL - 76, 110

    def place(size: int, peak: float) -> str:
        return f"{x0 + wide * size / sizes[-1]:.1f},{y0 - tall * peak / high:.1f}"

    line = " ".join(place(size, predicted[size]) for size in sizes)
    dots = [
        f'<circle cx="{x}" cy="{y}" r="3" fill="{MEASURED}"/>'
        for x, y in (place(size, measured[size]).split(",") for size in sizes)
    ]
    return "\n".join(
        [
            f'<text x="{left + 4}" y="{top + 12}" class="case">{escape(name)}</text>',
            f'<text x="{left + CELL - 30}" y="{top + 12}" text-anchor="end">{case["worst"]:.2%} off</text>',
            f'<path d="M{x0} {y0 - tall} V{y0} H{x0 + wide}" fill="none" stroke="#999"/>',
            f'<text x="{x0 - 4}" y="{y0 - tall + 4}" text-anchor="end">{high / 2**20:.0f}</text>',
            f'<text x="{x0 - 4}" y="{y0 - tall + 16}" text-anchor="end">MiB</text>',
            f'<text x="{x0 - 4}" y="{y0}" text-anchor="end">0</text>',
            f'<text x="{x0}" y="{y0 + 14}">0</text>',
            f'<text x="{x0 + wide}" y="{y0 + 14}" text-anchor="end">{sizes[-1]} rows, by {escape(case["method"])}</text>',
            f'<polyline points="{line}" fill="none" stroke="{PREDICTED}" stroke-width="2"/>',
            *dots,
        ]
    )


def ranks_picture(ddp: Mapping[str, Mapping[str, Any]], fsdp: Mapping[str, Any]) -> str:
    """Bars of the time per batch on two ranks, as a ratio to a synchronisation per micro-batch; for FSDP2 with peaks."""
    lines, y, unit, left = [], 46, 400, 240
    for title, results in {**ddp, "FSDP2, the same transformer: parameters": fsdp}.items():
        lines.append(f'<text x="12" y="{y}" class="case">{escape(title)}</text>')
        y += 8
        for name, result in results.items():
            width = unit * result["ratio"]
            colour = "#1a7f5a" if "anybatch" in name or "kept" in name else "#b0b0b0"
            peak = f", peak {result['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in result else ""
            lines += [
                f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{left}" y="{y + 1}" width="{width:.1f}" height="{BAR - 3}" fill="{colour}"/>',
                f'<text x="{left + width + 6:.1f}" y="{y + 12}">{result["ratio"]:.2f}{peak}</text>',
            ]
            y += BAR
        y += GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">',
            "<style>text{font:11px system-ui,sans-serif;fill:#222}.case{font-weight:600;font-size:13px}</style>",
            f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
            '<text x="12" y="20" class="case">Time per batch on two ranks, 8 micro-batches each, to the first</text>',
            *lines,
            "</svg>\n",
        ]
    )
