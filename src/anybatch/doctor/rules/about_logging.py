"""What is logged: a loss that was divided for backward, shown as if it had not been."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from anybatch.doctor.finding import Finding
from anybatch.doctor.loop_case import LoopCase
from anybatch.doctor.loops import near, spot_of


def logging_rules(case: LoopCase) -> Iterator[Finding]:
    """Numbers read off the loss that backward was given, where that is 1/n of it and nobody multiplies it back."""
    n = case.size
    divided = [w for w in case.weighings if w is not None and w.kind == "mean" and w.num_terms == 1 and w.ratio == 1.0]
    if n < 2 or not any(len(w.shares) == n and all(near(share, 1 / n) for share in w.shares) for w in divided):
        return
    for line in case.loop.others.get("read", ()):
        if not _is_undone(line):
            text = (
                f"The loss that is read here was divided by {n} for backward: what is logged is 1/{n} of the loss of a "
                "micro-batch."
            )
            yield case.finding("loss-logged-divided", "warning", spot_of(line.get("place")), text, {"divided_by": n})


def _is_undone(line: Mapping[str, Any]) -> bool:
    """Multiplied again, or added up: n parts of one mean are the mean, unless the sum is divided once more."""
    text, name = str(line.get("text", "")), str(line.get("variable", ""))
    uses = [str(use) for use in line.get("uses", ())]
    if "*" in text or any("*" in use for use in uses):
        return True
    if not name or "+=" not in text:
        return False
    word = re.escape(name)
    resets = sum(bool(re.match(rf"{word}\s*=\s*0", use)) for use in uses)
    return resets > 1 or not any(re.search(rf"(?<![\w.]){word}\s*/[^/]", use) for use in uses)
