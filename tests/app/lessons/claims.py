"""A claim measured again by torch. The loop's text comes from the page, and Python executes it."""

from functools import cache
from typing import Any

from tests.app.lessons import measures


def measured(engine: Any, measure: str, setting: dict[str, Any]) -> str:
    """What the claim should say."""
    return measures.SHOWN[measure](value_of(engine, measure, setting))


def value_of(engine: Any, measure: str, setting: dict[str, Any]) -> float:
    if measure in ("contrastive", "dropout", "unscaled"):
        return getattr(measures, measure)()
    if measure.startswith("plan"):
        table = planned()
        peak = table[setting["size"]]
        return peak if measure == "plan_bytes" else peak / max(table.values())
    text = engine.evaluate("setting => engine.loop(setting)", setting)
    if measure == "apart":
        return measures.apart(setting, text)
    return measures.of_a_run(measure, setting, text)


@cache
def planned() -> dict[int, int]:
    """The peaks that `plan` gives for the built-in task `stdlib`, by tokens."""
    from anybatch.app.lessons.pages.lesson_content import memory_table

    return {size["size"]: size["peak"] for size in memory_table()["sizes"]}
