"""How far the accumulated gradient is from the whole batch's, computed at once in float64.

    python -m benchmarks.exactness

Three ways to the same batch: the loop of the textbooks (every micro-batch divided by the number that a full window has),
anybatch, and the whole batch at once in the model's own precision, which is the floor.
"""

import copy
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import Update, supervised
from benchmarks.models import TokenModel

RESULTS = Path(__file__).parent.parent / "docs" / "benchmarks" / "exactness.json"
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a batch whose rows are not all alike."""

    name: str
    model: nn.Module
    batch: Pair
    micro_batch: int
    full_window: int
    weight: Tensor | None = None
    clip_share: float | None = None
    """Clip to this share of the true gradient's norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors against float64."""

    textbook_loop: float
    anybatch: float
    at_once: float


def cases() -> list[Case]:
    torch.manual_seed(0)
    x = torch.randn(40, 10)
    tail = (x, (x.sum(1) > 0).long())
    lengths = torch.empty(32).log_normal_(2.5, 1.0).clamp(2, 80).long()
    tokens = torch.randint(0, 50, (32, int(lengths.max())))
    next_tokens = tokens.roll(-1, 1).masked_fill(torch.arange(tokens.shape[1]) >= lengths[:, None], -100)
    classes = torch.multinomial(torch.tensor([0.6, 0.35, 0.05]), 64, replacement=True)
    weighted = (torch.randn(64, 10), classes)
    many = (torch.randn(1024, 64).bfloat16(), torch.randint(0, 10, (1024,)))
    linear = nn.Linear(10, 2)
    return [
        Case(name="a tail of 40 rows, by 16", model=linear, batch=tail, micro_batch=16, full_window=4),
        Case(name="clipping on that tail", model=linear, batch=tail, micro_batch=16, full_window=4, clip_share=0.9),
        Case(
            name="ragged tokens, 8 micro-batches of 4",
            model=TokenModel(),
            batch=(tokens, next_tokens),
            micro_batch=4,
            full_window=8,
        ),
        Case(
            name="class weights 0.2, 1, 20",
            model=nn.Linear(10, 3),
            batch=weighted,
            micro_batch=8,
            full_window=8,
            weight=torch.tensor([0.2, 1.0, 20.0]),
        ),
        Case(
            name="bf16 parameters, 256 micro-batches",
            model=nn.Linear(64, 10).bfloat16(),
            batch=many,
            micro_batch=4,
            full_window=256,
        ),
    ]


def measure(case: Case) -> Errors:
    """All three ways on copies of one model."""
    at_once = clipped_to(case, lambda model: loss_of(case, model, case.batch).backward())
    return Errors(
        textbook_loop=error(clipped_to(case, lambda model: textbook_loop(case, model)), case),
        anybatch=error(with_anybatch(case), case),
        at_once=error(at_once, case),
    )


def with_anybatch(case: Case) -> nn.Module:
    model = copy.deepcopy(case.model)
    Update(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        supervised(nn.CrossEntropyLoss(case.weight)),
        micro_batch=case.micro_batch,
        clip_norm=clip_norm(case),
    )(case.batch)
    return model


def textbook_loop(case: Case, model: nn.Module) -> None:
    inputs, targets = (column.split(case.micro_batch) for column in case.batch)
    for part in zip(inputs, targets, strict=True):
        (loss_of(case, model, part) / case.full_window).backward()


def clipped_to(case: Case, fill: Callable[[nn.Module], None]) -> nn.Module:
    model = copy.deepcopy(case.model)
    fill(model)
    limit = clip_norm(case)
    if limit is not None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
    return model


def loss_of(case: Case, model: nn.Module, batch: Pair) -> Tensor:
    logits = model(batch[0])
    precise = logits if logits.dtype == torch.float64 else logits.float()
    weight = None if case.weight is None else case.weight.to(precise.dtype)
    return F.cross_entropy(precise, batch[1], weight)


def reference(case: Case) -> Tensor:
    twin = copy.deepcopy(case.model).double()
    inputs, targets = case.batch
    loss_of(case, twin, (inputs.double() if inputs.is_floating_point() else inputs, targets)).backward()
    return gradient(twin)


def clip_norm(case: Case) -> float | None:
    return None if case.clip_share is None else case.clip_share * float(reference(case).norm())


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def error(model: nn.Module, case: Case) -> float:
    wanted, limit = reference(case), clip_norm(case)
    if limit is not None:
        wanted = wanted * limit / (wanted.norm() + 1e-6)
    return float((gradient(model) - wanted).norm() / wanted.norm())


def main() -> None:
    print(f"{'relative error of the gradient':38}  textbook loop  anybatch  at once")
    measured = {}
    for case in cases():
        errors = measure(case)
        print(
            f"{case.name:38}  {errors.textbook_loop:13.2g}  {errors.anybatch:8.1e}  {errors.at_once:7.1e}", flush=True
        )
        measured[case.name] = asdict(errors)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(
        json.dumps({"date": date.today().isoformat(), "versions": versions, "errors": measured}, indent=1) + "\n"
    )
    print(f"\nwritten to docs/benchmarks/{RESULTS.name}")


if __name__ == "__main__":
    main()
