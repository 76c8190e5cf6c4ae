"""The source tree keeps its rules. Each rule is tested twice: the tree keeps it, and a tree that breaks it is reported."""

from collections.abc import Callable
from pathlib import Path

import pytest

import anybatch
from tests.house.structure import (
    Tree,
    import_cycles,
    imports_past_the_init,
    over_budget,
    private_imports,
    upward_imports,
)

BUDGET = {
    "errors": 140,
    "display": 200,
    "core": 6_975,
    "ragged": 1_150,
    "batch_norm": 1_205,
    "parallel": 1_020,
    "objectives": 800,
    "dropout": 375,
    "noise": 260,
    "verification": 3_850,
    "memory": 2_515,
    "doctor": 3_360,
    "integrations": 1_090,
    "app.records": 760,
    "app.training": 2_460,
    "app.selftest": 285,
    "app.lessons": 1_205,
    "app.report": 1_665,
    "app.cli": 1_695,
    "__main__": 10,
}
"""Lines of each part, in the order in which they may import each other: each imports those before it. A larger budget needs a
reason in its commit."""
ORDER = list(BUDGET)
LOADERS = {"core.plugins"}
"""The core knows the packages above it in this one module, which loads them when a model or an option needs them."""
ONLY = {"app.report": {"errors", "display", "app.records"}}
"""The report takes finished results, and knows nothing of how they came about."""


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(Path(anybatch.__file__).parent)


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Tree]:
    """Make a tree `garden` of these files, by path: `a__in__one="import garden.b"`."""

    def write(**files: str) -> Tree:
        root = tmp_path / "garden"
        for name, text in {"__init__": "", **files}.items():
            path = root / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder in (folder for folder in root.rglob("*") if folder.is_dir()):
            (folder / "__init__.py").touch()
        return Tree(root)

    return write


def test_imports_point_down(tree):
    assert upward_imports(tree, ORDER, LOADERS, ONLY) == []


def test_an_import_that_points_up_is_found(plant):
    tree = plant(low="from garden.high import x", high="import garden.low", narrow="def f():\n    import garden.low\n")
    assert upward_imports(tree, ["low", "high", "narrow"]) == ["low imports high: high is not below low"]
    assert upward_imports(tree, ["low", "high"]) == [
        "low imports high: high is not below low",
        "narrow is not in the list of parts",
    ]
    assert upward_imports(tree, ["high", "narrow", "low"]) == [
        "high imports low: low is not below high",
        "narrow imports low: low is not below narrow",
    ]
    assert upward_imports(tree, ["high", "narrow", "low"], loaders=["narrow", "high"]) == [
        "high imports low: low is not below high"
    ]
    assert upward_imports(tree, ["low", "high", "narrow"], only={"low": ["high"], "narrow": ["high"]}) == [
        "narrow imports low: low is not below narrow"
    ]


def test_programs_of_app_are_parts_of_their_own_and_types_are_not_looked_at(plant):
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from garden.app.two import x\n"
    tree = plant(app__in__one__in__a="import garden.app.two.b", app__in__two__in__b="", app__in__three__in__c=typed)
    assert upward_imports(tree, ["app.one", "app.two", "app.three"]) == [
        "app.one.a imports app.two.b: app.two is not below app.one"
    ]


def test_a_package_is_entered_through_its_init(tree):
    assert imports_past_the_init(tree, {"core.events"}) == []


def test_an_import_past_an_init_is_found(plant):
    tree = plant(
        a__in__one="", b__in__two="from garden.a.one import x\nfrom garden.a import x", c="from garden.a import one"
    )
    assert imports_past_the_init(tree) == [
        "b.two imports a.one past a/__init__.py",
        "c imports a.one past a/__init__.py",
    ]
    assert imports_past_the_init(tree, {"a.one"}) == []


def test_no_private_name_of_another_package_is_imported(tree):
    assert private_imports(tree) == []


def test_a_private_name_of_another_package_is_found(plant):
    tree = plant(a__in__one="_x = 1", a__in__two="from garden.a.one import _x", b="from garden.a import _x, __doc__")
    assert private_imports(tree) == ["b imports a._x, which is private"]


def test_no_modules_import_each_other_in_a_circle(tree):
    assert import_cycles(tree) == []


def test_a_circle_is_found_unless_it_is_closed_inside_a_function(plant):
    tree = plant(a="import garden.b", b="import garden.a", c="def f():\n    import garden.d\n", d="import garden.c")
    (found,) = import_cycles(tree)
    assert set(found.split(" is imported by ")) == {"a", "b"}


def test_every_part_stays_within_its_budget_of_lines(tree):
    assert over_budget(tree, BUDGET) == []


def test_a_part_above_its_budget_is_found(plant):
    tree = plant(a__in__one="x = 1\n" * 8, b="x = 1\n" * 3)
    assert over_budget(tree, {"a": 7, "b": 3}) == ["a has 8 lines, and 7 are its budget"]
    assert over_budget(tree, {"a": 8}) == ["b has no budget"]
