"""The page of a self-test: a table per group, to be attached to an issue with its JSON."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def write_self_test_page(found: Mapping[str, Any], page: Path) -> Path:
    """Write the page of `self-test.json`'s object: one file that needs no other and no network."""
    environment = Environment(loader=PackageLoader("anybatch.report"), autoescape=True, undefined=StrictUndefined)
    groups: dict[str, list[Any]] = {}
    for check in found["checks"]:
        groups.setdefault(check["group"], []).append(check)
    style = files("anybatch.report").joinpath("templates", "page.css").read_text("utf-8")
    text = environment.get_template("self_test.html").render(
        found=found,
        groups=groups,
        failed=sum(not check["has_passed"] for check in found["checks"]),
        style=Markup(style),
    )
    page.write_text(text, encoding="utf-8")
    return page
