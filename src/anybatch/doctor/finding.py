"""Findings: what is wrong with a loop, at which line, with the numbers that show it and the fix."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of the user's code, the library function called there, and a hash of the calls that led to it."""

    file: str = ""
    line: int = 0
    function: str = ""
    via: str = ""
    chain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, slow, or cannot be told."""

    kind: str
    severity: Severity
    """error: the update is not what one batch would give; warning: slow, or depends on intent; note: cannot be told."""
    file: str
    line: int
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    own_fix: str = ""
    """The fix in the user's own loop."""
    anybatch_fix: str = ""
    """The loop written with anybatch."""

    @property
    def fix(self) -> str:
        """Both fixes as one text."""
        return f"{self.own_fix}\nor, with {self.anybatch_fix}" if self.anybatch_fix else self.own_fix

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        names = ("kind", "severity", "file", "line", "message", "evidence", "fix")
        return {name: getattr(self, name) for name in names} | {"evidence": dict(self.evidence)}


def finding_at(
    spot: Spot,
    kind: str,
    severity: Severity,
    message: str,
    evidence: Mapping[str, Any] | None = None,
    *,
    num_micro_batches: int = 0,
    rows: int = 0,
) -> Finding:
    """A finding with the fix of its kind; in the fix, a number that is not known stays a name or an example."""
    numbers = {
        "{n}": str(num_micro_batches) if num_micro_batches > 1 else "n",
        "{rows}": str(rows or 16),
        "{batch}": str(rows * num_micro_batches or 64),
    }
    own, ours = FIXES[kind], WITH_ANYBATCH if FIXES[kind] and kind not in WITHOUT_ANYBATCH else ""
    for name, number in numbers.items():
        own, ours = own.replace(name, number), ours.replace(name, number)
    return Finding(
        kind=kind,
        severity=severity,
        file=spot.file,
        line=spot.line,
        message=message,
        evidence=evidence or {},
        own_fix=own,
        anybatch_fix=ours,
    )


def name_ranks(findings: list[tuple[int, Finding]]) -> list[Finding]:
    """Add to each finding the ranks that have it; those of one process stay as they are."""
    if len({rank for rank, _ in findings}) < 2:
        return [one for _, one in findings]
    ranks: dict[tuple[str, str, int], set[int]] = {}
    for rank, one in findings:
        ranks.setdefault((one.kind, one.file, one.line), set()).add(rank)
    return [
        replace(one, evidence={**one.evidence, "ranks": sorted(ranks[one.kind, one.file, one.line])})
        for _, one in findings
    ]


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors first, each kind and line once."""
    first: dict[tuple[str, str, int], Finding] = {}
    for finding in sorted(findings, key=lambda one: SEVERITIES.index(one.severity)):
        first.setdefault((finding.kind, finding.file, finding.line), finding)
    return tuple(first.values())


_FLUSH = """    in_this_update = min({n}, len(loader) - i // {n} * {n})
    (loss / in_this_update).backward()
    if (i + 1) % {n} == 0 or i + 1 == len(loader):"""

FIXES = {
    "cleared-before-use": "clear only after the step:\n    optimizer.step()\n    optimizer.zero_grad()",
    "stepped-every-micro-batch": (
        "step and clear together, once per {n} micro-batches:\n    if (i + 1) % {n} == 0:\n        optimizer.step()\n"
        "        optimizer.zero_grad()"
    ),
    "not-divided": "divide the loss:\n    (loss / {n}).backward()",
    "divided-twice": "divide once; where a framework divides already, leave the loss as it is:\n    (loss / {n}).backward()",
    "other-divisor": "divide by the number of micro-batches that this update really has:\n    (loss / {n}).backward()",
    "tail-dropped": f"step on the last micro-batch of the epoch too, and divide by how many there are:\n{_FLUSH}",
    "tail-leaks": f"step on the last micro-batch of the epoch too, so that nothing is carried into the next:\n{_FLUSH}",
    "left-at-end": f"step once more after the last micro-batch:\n{_FLUSH}",
    "uneven-micro-batches": (
        "weight each micro-batch by what its mean divides by, over the whole update:\n"
        "    loss = criterion(outputs, targets)  # with reduction='sum'\n    (loss / units_of_all_micro_batches).backward()"
    ),
    "clip-early": "clip once, after the last backward of the update and before the step.",
    "clip-scaled": "unscale first:\n    scaler.unscale_(optimizer)\n    torch.nn.utils.clip_grad_norm_(...)",
    "clip-after-step": "clip before the step:\n    torch.nn.utils.clip_grad_norm_(...)\n    optimizer.step()",
    "schedule-per-micro-batch": "step the scheduler with the optimizer:\n    optimizer.step()\n    scheduler.step()",
    "schedule-before-step": "first the optimizer, then the scheduler:\n    optimizer.step()\n    scheduler.step()",
    "schedule-horizon": "make the schedule for updates:\n    num_training_steps = epochs * math.ceil(len(loader) / {n})",
    "scaler-misuse": (
        "scale every loss of the update with one scale; then, once per update:\n    scaler.unscale_(optimizer)\n"
        "    scaler.step(optimizer)\n    scaler.update()"
    ),
    "ddp-every-pass": (
        "synchronise in the last micro-batch only, forward and backward inside the block:\n"
        "    with nullcontext() if is_last else model.no_sync():"
    ),
    "ddp-backward-only": (
        "put the forward inside no_sync as well: DDP decides at forward.\n    with model.no_sync():\n"
        "        loss = criterion(model(inputs), targets)\n        loss.backward()"
    ),
    "ddp-never": "run the last micro-batch of every update, forward and backward, outside no_sync.",
    "batch-norm": "use GroupNorm or LayerNorm, or frozen statistics (model.eval() on these layers), or a larger micro-batch.",
    "never-cleared": "clear after every step:\n    optimizer.step()\n    optimizer.zero_grad()",
    "kept-graph": "keep the number, not the graph:\n    total += loss.item()      # or losses.append(loss.detach())",
    "unowned-parameters": "give them to the optimizer, or freeze them:\n    parameter.requires_grad_(False)",
    "low-precision-sum": (
        "sum in fp32, before the first backward:\n    for p in model.parameters(): p.grad_dtype = torch.float32"
    ),
    "off-by-one": "count from one:\n    if (i + 1) % {n} == 0:",
    "negatives-missing": (
        "accumulating does not bring the negatives of other micro-batches back; cache the representations:\n"
        "    anybatch.Update(model, optimizer, anybatch.Coupled(encode, loss), micro_batch={rows})"
    ),
    "rows-repeated": "deal the rows out:\n    sampler = DistributedSampler(dataset, shuffle=True)",
    "windows-differ": "step all optimizers after the same micro-batches.",
    "eval-left-on": "switch back after validation:\n    model.train()",
    "loss-logged-divided": "log the loss as it was before the division:\n    print(loss.item() * {n})",
    "learning-rate": "raise it by the rule, and warm up:\n    anybatch.scale_lr(optimizer, batch={batch}, base_batch={rows})",
    "by-hand": "",
    "opaque-loss": "",
    "recorder-trouble": "",
}
"""The fix of every kind of finding, by kind."""
KINDS = tuple(FIXES)
"""Every kind, the same in text, JSON and docs."""
WITH_ANYBATCH = """anybatch, where the loader yields the whole batch of {batch} rows:
    update = anybatch.Update(model, optimizer, anybatch.supervised(criterion), micro_batch={rows})
    for batch in loader:
        update(batch)"""
WITHOUT_ANYBATCH = (
    "negatives-missing",
    "learning-rate",
    "kept-graph",
    "unowned-parameters",
    "eval-left-on",
    "loss-logged-divided",
)
