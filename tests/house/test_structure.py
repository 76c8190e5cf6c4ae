"""The tree keeps its rooms: imports point down, and a package is entered through its `__init__`.

Each rule is tested twice: the tree keeps it, and a tree that breaks it is told so.
"""

from pathlib import Path

import pytest

import anybatch
from tests.house.structure import (
    Tree,
    arrows_between_rooms,
    circles_inside_rooms,
    doors_passed_by,
    exports_named_as_submodules,
    unsorted_exports,
)

ROOMS = [
    "faces",
    "errors",
    "sizes",
    "options",
    "torch_inside",
    "low_precision",
    "loss_units",
    "autograd_graph",
    "host_memory",
    "device_memory",
    "events",
    "stages",
    "batches",
    "parallel",
    "state",
    "objectives",
    "noise",
    "norms",
    "dropout",
    "gradients",
    "passes",
    "proof",
    "update",
    "memory",
    "doctor",
    "integrations",
    "records",
    "training",
    "selftest",
    "lessons",
    "report",
    "cli",
    "__main__",
]
"""Each may import those before it."""
ONLY = {"report": {"errors", "records"}}
"""The report takes finished results, and knows nothing of how they came about."""
ENTRIES = {"cli.main"}
"""Named outright in pyproject.toml and in `__main__`."""

# What is not yet as it should be: these lists only become shorter.
UPWARD: set[tuple[str, str]] = {("batches.splits.micro_batch_option", "memory")}
"""The word "auto" is spelled out where `micro_batch=` is read, and stands for a split of a later room."""
CIRCLES = {"cli"}
NAMED_AS_SUBMODULES: set[str] = set()


@pytest.fixture(scope="module")
def house() -> Tree:
    return Tree(Path(anybatch.__file__).parent)


@pytest.fixture
def plant(tmp_path: Path):
    """A tree `garden` of these files, by path."""

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


def test_arrows_point_down_between_rooms(house):
    assert arrows_between_rooms(house, ROOMS, ONLY, UPWARD) == []


def test_an_arrow_that_points_up_is_found(plant):
    tree = plant(low="from garden.high import x", high="import garden.low", narrow="def f():\n    import garden.low\n")
    assert arrows_between_rooms(tree, ["low", "high", "narrow"], {}) == ["low imports high: low lies below high"]
    assert arrows_between_rooms(tree, ["high", "low", "narrow"], {"narrow": ["high"]}) == [
        "high imports low: high lies below low",
        "narrow imports low: narrow lies below low",
    ]
    assert arrows_between_rooms(tree, ["low", "high"], {}, {("low", "high"), ("high", "narrow")}) == [
        "narrow is not in the list of rooms",
        "high no longer imports narrow: take it out of the list",
    ]


def test_no_room_goes_round_in_circles(house):
    assert {told.split()[0] for told in circles_inside_rooms(house)} == CIRCLES, circles_inside_rooms(house)


def test_a_circle_inside_a_room_is_found_also_through_a_room_inside(plant):
    tree = plant(
        a__in__one="from garden.a.sub import x",
        a__in__sub__in__two="from garden.a.three import y",
        a__in__three="from garden.a.one import z",
    )
    (told,) = circles_inside_rooms(tree)
    assert told.startswith("a goes round in a circle: ")
    for way in ("a.one imports a.sub", "a.sub.two imports a.three", "a.three imports a.one"):
        assert way in told


def test_a_room_is_entered_through_its_door(house):
    assert doors_passed_by(house, ENTRIES) == []


def test_who_passes_by_a_door_is_found(plant):
    tree = plant(
        a__in__one="",
        a__in__sub__in__two="from garden.a.one import x",
        a__in__three="from garden.a.sub.two import x",
        b__in__four="from garden.a.one import x\nfrom garden.a import x\nfrom garden.a import one",
        a__in__five="from garden.a import x\nfrom garden.b import x",
    )
    assert sorted(doors_passed_by(tree, ())) == [
        "a.five imports a, the door of its own room: name the file inside",
        "a.three imports a.sub.two past the door a.sub",
        "b.four imports a.one past the door a",
        "b.four imports a.one past the door a",
    ]
    assert len(doors_passed_by(tree, {"a.one"})) == 2


def test_no_export_is_named_as_a_submodule(house):
    assert set(exports_named_as_submodules(house)) <= NAMED_AS_SUBMODULES


def test_an_export_named_as_a_submodule_is_found(plant):
    tree = plant(a__in____init__='__all__ = ["one", "two"]', a__in__one="")
    assert exports_named_as_submodules(tree) == ["a exports one, and has a submodule one"]


def test_exports_are_sorted(house):
    assert unsorted_exports(house) == []


def test_exports_that_are_not_sorted_are_found(plant):
    tree = plant(a__in____init__='__all__ = ["b", "a"]', c='__all__ = ["a", "a"]', d='__all__ = ["B", "a"]')
    assert unsorted_exports(tree) == ["a has an __all__ that is not sorted", "c has an __all__ that is not sorted"]
