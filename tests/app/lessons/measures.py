"""Every measure that a claim of a lesson names, taken by torch, and how it is written on a page."""

from functools import cache
from typing import Any

import torch
from torch import nn

from anybatch.display import show_bytes
from tests.app.lessons.torch_twin import Run, Setting, make_model, run, uniform


def near(count: torch.Tensor) -> torch.Tensor:
    return (count - 1).abs() < 1e-9


def spent(found: Run) -> float:
    return next(k for k, update in enumerate(found.updates) if update.rate == 0) / len(found.updates)


OF_A_RUN = {
    "lost": lambda found: int((found.counts == 0).sum()),
    "once": lambda found: int(near(found.counts).sum()),
    "most": lambda found: float(found.counts.max()),
    "least": lambda found: float(found.counts[found.counts != 0].min()),
    "worst": lambda found: found.worst,
    "off": lambda found: found.off,
    "per_epoch": lambda found: len(found.updates) // found.setting.epochs,
    "passes": lambda found: found.passes,
    "loss": lambda found: found.epochs[-1][0],
    "accuracy": lambda found: found.epochs[-1][1],
    "accuracy_first": lambda found: found.epochs[0][1],
    "seventh": lambda found: found.epochs[-1][2],
    "spent": spent,
}
"""Measures of a loop; the page takes them too."""


def percent(value: float) -> str:
    if value >= 10:
        return f"{value:,.0f} times"
    return f"{100 * value:.1f} %" if value < 0.1 else f"{100 * value:.0f} %"


def factor(value: float) -> str:
    return "\u00d7 " + (f"{value:.0f}" if value >= 10 else f"{value + 1e-9:.2f}".rstrip("0").rstrip("."))


SHOWN = {
    "lost": str,
    "once": lambda value: f"{value:,}",
    "most": factor,
    "least": factor,
    "worst": percent,
    "off": str,
    "per_epoch": str,
    "passes": str,
    "loss": lambda value: f"{value:.3f}",
    "accuracy": lambda value: f"{100 * value:.1f} %",
    "accuracy_first": lambda value: f"{100 * value:.1f} %",
    "seventh": lambda value: f"{100 * value:.1f} %",
    "spent": lambda value: f"{100 * value:.0f} %",
    "apart": lambda value: "less than 10⁻¹²" if value < 1e-12 else percent(value),
    "contrastive": percent,
    "dropout": percent,
    "unscaled": lambda value: f"{value:.0f}",
    "plan_bytes": show_bytes,
    "plan_ratio": lambda value: f"{100 * value:.0f} %",
}


def of_a_run(measure: str, setting: dict[str, Any], text: str) -> float:
    given = tuple(sorted((key, value) for key, value in setting.items() if key != "breaks"))
    return OF_A_RUN[measure](_run(text, given))


@cache
def _run(text: str, given: tuple[tuple[str, Any], ...]) -> Run:
    """Claims that share a setting share its run."""
    return run(Setting(text=text, **dict(given)))


def apart(setting: dict[str, Any], text: str) -> float:
    """How far weights differ between 64 rows at once and 4 x 16."""
    cut, whole = (
        run(Setting(text=text, judged=False, micro=micro, every=64 // micro, **setting)) for micro in (16, 64)
    )
    return float((cut.weights - whole.weights).norm() / whole.weights.norm())


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    draw = uniform(seed)
    return torch.tensor([[2 * next(draw) - 1 for _ in range(columns)] for _ in range(rows)], dtype=torch.float64)


def contrastive() -> float:
    """InfoNCE of 64 pairs through the small net, eight at a time, against all at once."""
    left, right = drawn(64, 10, 5), drawn(64, 10, 5) + 0.3 * drawn(64, 10, 6)
    model = make_model("net", 0)[:2]

    def gradient(parts: list[slice]) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            one, other = (nn.functional.normalize(model(side[part]), dim=1) for side in (left, right))
            (nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one))) / len(parts)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient([slice(0, 64)]).clone()
    cut = gradient([slice(k, k + 8) for k in range(0, 64, 8)])
    return float((cut - whole).norm() / whole.norm())


def dropout() -> float:
    """One batch of 64 rows, two layers of dropout 0.1, one seed: at once, and 16 at a time."""
    inputs = drawn(64, 10, 5)
    targets = (inputs.sum(1) > 0).long()
    net = make_model("net", 0)
    model = nn.Sequential(nn.Dropout(0.1), *net[:2], nn.Dropout(0.1), net[2])

    def gradient(size: int) -> torch.Tensor:
        torch.manual_seed(0)
        model.zero_grad()
        for k in range(0, 64, size):
            (nn.functional.cross_entropy(model(inputs[k : k + size]), targets[k : k + size]) * size / 64).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient(64).clone()
    return float((gradient(16) - whole).norm() / whole.norm())


def unscaled() -> float:
    """Two micro-batches with gradient 1 each, scale 1,024, unscaled after the first."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(weight.sum()).backward()
    return float(weight.grad)
