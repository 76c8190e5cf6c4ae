"""Whether the weights of an update's terms are equal and add up to 1."""

from collections.abc import Iterator

from anybatch.doctor.finding import Finding
from anybatch.doctor.loop_case import LoopCase, first_spot, plural
from anybatch.doctor.loops import LoopUpdate, Weighing, gradient_error, near


def weight_rules(case: LoopCase) -> Iterator[Finding]:
    """Forgotten, doubled and other divisions; micro-batches of unequal size; a step in every micro-batch."""
    if case.is_by_hand:
        return
    pairs = [(u, w) for u, w in zip(case.updates, case.weighings, strict=True) if w is not None]
    if case.size == 1:
        yield from _stepped_every(case, pairs)
    first = case.updates[0] if case.is_off_by_one else None
    for update, weighing in pairs:
        is_told = update.stale or update.number in case.robbed or update is first  # by other rules
        if max(case.size, len(weighing.shares)) > 1 and not weighing.is_plain_sum and not is_told:
            yield from _division(case, update, weighing)
    yield from _uneven(case, pairs)


def _measured(update: LoopUpdate, weighing: Weighing) -> tuple[str, dict[str, object]]:
    error = gradient_error(update, weighing)
    facts: dict[str, object] = {
        "update": update.number,
        "micro_batches": len(weighing.shares),
        "weights": [round(share, 6) for share in weighing.shares],
        "sum_of_weights": round(weighing.total, 6),
        "terms": list(weighing.counts),
    }
    if error is None:
        return "", facts
    return f" The gradient is {100 * error:.3g} % off what one batch would give (measured).", {**facts, "error": error}


def _division(case: LoopCase, update: LoopUpdate, weighing: Weighing) -> Iterator[Finding]:
    n, total = len(weighing.shares), weighing.total
    if near(total, 1.0) or not total:
        return
    told, facts = _measured(update, weighing)
    spot = first_spot(update.passes)
    start = f"The weights of update {update.number} add up to {total:.2f} over {plural(n, 'micro-batch')}"
    share = weighing.shares[0]
    is_constant = all(near(each, share) for each in weighing.shares)
    if is_constant and near(share, 1.0):
        text = f"{start}: the loss is not divided, so the step is {n} times as large as that of one batch.{told}"
        yield case.finding("not-divided", "error", spot, text, facts)
    elif is_constant and n > 1 and near(total, 1.0 / n) and _is_surely(case, weighing, n):
        text = f"{start}: the loss is divided by {n} twice, so the step is {n} times too small.{told}"
        yield case.finding("divided-twice", "error", spot, text, facts)
    elif n < case.size and is_constant and near(share, 1.0 / case.size) and case.is_usually_whole:
        only = case.without_tail
        text = (
            f"{start}: it has {n}, and each loss is divided by {case.size}. A short update counts for too little."
            f"{told}{only}"
        )
        yield case.finding("other-divisor", "warning" if only else "error", spot, text, facts)
    elif n == case.size:
        yield from _other(case, update, weighing, start, told, facts)


def _is_surely(case: LoopCase, weighing: Weighing, n: int) -> bool:
    """With several losses a factor may be meant, unless their sum says otherwise too."""
    return weighing.num_terms == 1 or (n in case.loop.intended.values() and not near(weighing.all_terms, 1.0))


def _other(
    case: LoopCase, update: LoopUpdate, weighing: Weighing, start: str, told: str, facts: dict[str, object]
) -> Iterator[Finding]:
    spot, n = first_spot(update.passes), len(weighing.shares)
    divisor = 1.0 / weighing.shares[0] if weighing.shares[0] else 0.0
    whole = round(divisor)
    is_whole = whole >= 2 and abs(divisor - whole) < 0.01 * divisor
    is_meant = (
        whole in case.loop.intended.values()
        or near(weighing.total, 1.0 / n**2)
        or whole > 2 * n
        or n in (whole - 1, whole + 1)
    )
    if is_whole and (is_meant or case.loop.intended) and weighing.num_terms == 1:
        text = f"{start}: each loss is divided by {whole}, and there are {n} of them.{told}"
        yield case.finding("other-divisor", "error", spot, text, facts)
        return
    text = (
        f"{start}. If your loss has a factor of its own, such as 0.5 * loss, this is right; "
        f"if not, the division is not by {n}. It cannot be told from outside."
    )
    yield case.finding("other-divisor", "note", spot, text, facts)


def _stepped_every(case: LoopCase, pairs: list[tuple[LoopUpdate, Weighing]]) -> Iterator[Finding]:
    meant = {value: name for name, value in case.loop.intended.items() if value > 1}
    if not pairs or not meant or len(case.updates) < 2:
        return
    if sum(not one.is_left for one in case.loop.lost) >= len(case.updates):
        return  # they are cleared, which is told elsewhere
    update, weighing = pairs[-1]
    divisor = round(1.0 / weighing.total) if weighing.total else 0
    spot = update.spot
    facts = {"update": update.number, "weight": weighing.total, "intended": dict(case.loop.intended)}
    if divisor in meant and near(weighing.total, 1.0 / divisor):
        text = (
            f"Every update is made of one micro-batch, and its loss is divided by {divisor}: the optimizer steps in every "
            f"micro-batch, with 1/{divisor} of the gradient, instead of once per {divisor}."
        )
        yield case.finding("stepped-every-micro-batch", "error", spot, text, facts)
    elif near(weighing.total, 1.0):
        value, name = next(iter(meant.items()))
        text = f"`{name}` is {value}, and every update is made of one micro-batch: the optimizer steps in every micro-batch."
        yield case.finding("stepped-every-micro-batch", "warning", spot, text, facts)


def _uneven(case: LoopCase, pairs: list[tuple[LoopUpdate, Weighing]]) -> Iterator[Finding]:
    several = [(u, w) for u, w in pairs if len(w.shares) > 1 and not u.stale]
    uneven = [
        (update, weighing)
        for update, weighing in several
        if not weighing.is_equal_by_term and all(near(share, weighing.shares[0]) for share in weighing.shares)
    ]
    if not uneven:
        return
    errors = [(gradient_error(u, w) or 0.0, u, w) for u, w in uneven]
    _, update, weighing = max(errors, key=lambda one: one[0])
    told, facts = _measured(update, weighing)
    counts = ", ".join(f"{count:,.4g}" for count in weighing.counts[:8])
    text = (
        f"The micro-batches of update {update.number} have {counts} terms, and each counts for the same "
        f"{weighing.shares[0]:.3g}: a term of the smallest weighs "
        f"{max(weighing.per_term) / max(min(weighing.per_term), 1e-30):.3g} "
        f"times one of the largest. This is a mean of means.{told}"
    )
    is_usual = 2 * len(uneven) > len(several)
    yield case.finding(
        "uneven-micro-batches", "error" if is_usual else "warning", first_spot(update.passes), text, facts
    )
