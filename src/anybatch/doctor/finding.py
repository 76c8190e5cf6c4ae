"""Findings: the mistakes in a training loop, each with its line, the numbers that show it and the fix."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of the user's code."""

    file: str = ""
    line: int = 0
    function: str = ""
    via: str = ""  # the library function called there
    chain: str = ""  # hash of the calls that led there


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem of a training loop, or something that cannot be decided from outside.

    Attributes:
        kind: Name of the problem, such as "not-divided"; the same in text, JSON and docs.
        severity: "error": the update is not what one batch would give. "warning": slow, or depends on intent. "note":
            advice, or something that cannot be decided.
        file: Path of the user's file; empty if unknown.
        line: Line in `file`; 0 if unknown.
        message: One to three sentences with the measured numbers.
        evidence: The numbers of the message, by name.
        own_fix: The fix in the user's own loop; empty for notes without one.
        anybatch_fix: The loop written with anybatch; empty where that is no fix.
    """

    kind: str
    severity: Severity
    file: str
    line: int
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    own_fix: str = ""
    anybatch_fix: str = ""

    @property
    def fix(self) -> str:
        """Both fixes as one text."""
        return f"{self.own_fix}\nor, with {self.anybatch_fix}" if self.anybatch_fix else self.own_fix

    def as_json(self) -> dict[str, Any]:
        """Return the finding as `anybatch doctor --json` prints it."""
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
    """Return a finding with the fix of its kind; a number of 0 is unknown and replaced by a name or an example."""
    own, ours = FIXES[kind], WITH_ANYBATCH if FIXES[kind] and kind not in WITHOUT_ANYBATCH else ""
    numbers = {
        "{n}": num_micro_batches if num_micro_batches > 1 else "n",
        "{rows}": rows or 16,
        "{batch}": rows * num_micro_batches or 64,
    }
    for name, number in numbers.items():
        own, ours = own.replace(name, str(number)), ours.replace(name, str(number))
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
"""Fix of each kind of finding."""
KINDS = tuple(FIXES)
WITH_ANYBATCH = """anybatch, where the loader yields the whole batch of {batch} rows:
    update = anybatch.Update(model, optimizer, anybatch.supervised(criterion), micro_batch={rows})
    for batch in loader:
        update(batch)"""
WITHOUT_ANYBATCH = (
    *("negatives-missing", "learning-rate", "kept-graph"),
    *("unowned-parameters", "eval-left-on", "loss-logged-divided"),
)
"""Kinds that `WITH_ANYBATCH` does not fix."""
