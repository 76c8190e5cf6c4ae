"""The tables and the picture of docs/benchmarks/scale.md, from the model of many ranks. Nothing is measured here.

python -m benchmarks.scale
"""

from pathlib import Path

from benchmarks.scale_model import (
    Network,
    PassSeconds,
    Projection,
    batch_table,
    ranks_table,
    sharding_table,
    update_table,
)

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "scale.svg"
PARAMETERS = 124e6
ONE_PASS = PassSeconds(
    rows=8, forward=0.024, backward=0.048, gradient_bytes=4 * PARAMETERS, parameter_bytes=4 * PARAMETERS
)
"""GPT-2 of 124 M parameters, fp32 gradients; 8 rows of 1,024 tokens at 6 x 124 M FLOPs per token and 85 TFLOP/s."""
FAST, SLOW = Network(ranks=64, bandwidth=25e9), Network(ranks=64, bandwidth=1.25e9, latency=30e-6)
"""Eight 200 Gbit/s links shared by eight ranks each; and 10 Gbit/s Ethernet."""
RANKS = (2, 8, 64, 256)
COUNTS = (1, 2, 4, 8, 16, 32)


def tables() -> list[list[str]]:
    """In the order of the page."""
    return [
        update_table(ONE_PASS, FAST, COUNTS),
        ranks_table(ONE_PASS, FAST, RANKS, 8),
        ranks_table(ONE_PASS, SLOW, RANKS, 8),
        batch_table(ONE_PASS, FAST),
        sharding_table(ONE_PASS, FAST, COUNTS),
    ]


def picture() -> str:
    """Efficiency by the number of micro-batches, on both networks, synchronised once and at every micro-batch."""
    left, top, width, height = 60, 50, 620, 260
    most = 64
    lines = []
    for share in (0, 25, 50, 75, 100):
        y = top + height * (1 - share / 100)
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share}%</text>')
    places = [2**power for power in range(most.bit_length())]

    def x_of(count: int) -> float:
        return left + width * places.index(count) / (len(places) - 1)

    for count in places:
        lines.append(f'<text x="{x_of(count):.1f}" y="{top + height + 18}" text-anchor="middle">{count}</text>')
    for name, network, colour in (("25 GB/s", FAST, "#1a7f5a"), ("1.25 GB/s", SLOW, "#b0562b")):
        each = [Projection(network=network, one_pass=ONE_PASS, micro_batches=count) for count in places]
        for word, shares, dash in (
            ("once per update", [one.efficiency for one in each], ""),
            ("at every micro-batch", [one.efficiency_each for one in each], ' stroke-dasharray="5 4"'),
        ):
            points = " ".join(
                f"{x_of(count):.1f},{top + height * (1 - share):.1f}"
                for count, share in zip(places, shares, strict=True)
            )
            lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            y = top + height * (1 - shares[-1]) + 4
            lines.append(f'<text x="{left + width + 8}" y="{y:.1f}" style="fill:{colour}">{name}, {word}</text>')
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="360" viewBox="0 0 900 360">',
            "<style>text{font:11px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:13px}</style>",
            '<rect width="900" height="360" fill="#ffffff"/>',
            '<text x="12" y="24" class="title">Share of time that 64 ranks compute, by micro-batches per update (model, '
            "GPT-2 124 M, 8 rows each)</text>",
            *lines,
            f'<text x="{left + width / 2:.0f}" y="{top + height + 40}" text-anchor="middle">micro-batches per update</text>',
            "</svg>\n",
        ]
    )


def main() -> None:
    PICTURE.write_text(picture())
    print("\n\n".join("\n".join(lines) for lines in tables()))
    print(f"\nwritten to docs/pictures/{PICTURE.name}")


if __name__ == "__main__":
    main()
