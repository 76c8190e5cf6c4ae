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
