"""Docstrings keep their rules. Each rule is tested twice: the package keeps it, and an example that breaks it is reported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import anybatch
from tests.house.docstrings import not_imperative, riddles, undescribed, without_example
from tests.house.structure import Tree


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(Path(anybatch.__file__).parent)


@pytest.fixture(scope="module")
def public() -> dict[str, Any]:
    return {name: getattr(anybatch, name) for name in anybatch._HOME}


@pytest.fixture
def planted(tmp_path: Path) -> Tree:
    root = tmp_path / "garden"
    (root / "bed").mkdir(parents=True)
    (root / "__init__.py").write_text(
        '"""Of its parameters."""\nx = 1\n"""Where it is."""\ny = 2\n"""Whole number."""\n'
    )
    (root / "bed" / "rows.py").write_text(
        'def f():\n    """Gives 1."""\n\n\ndef g():\n    """Return 1."""\n\n\ndef h():\n    """How many."""\n\n\n'
        'class A:\n    """The first."""\n\n    @property\n    def b(self):\n        """The second."""\n\n'
        '    def c(self):\n        """The third."""\n'
    )
    return Tree(root)


def test_no_docstring_is_a_riddle(tree):
    assert riddles(tree) == []


def test_riddles_are_found(planted):
    assert riddles(planted) == ["garden:1 begins with Of", "garden:3 begins with Where", "bed.rows:10 begins with How"]


def test_docstrings_of_functions_begin_with_an_imperative(tree):
    assert not_imperative(tree) == []


def test_third_persons_and_nouns_are_found_unless_they_describe_a_class_or_a_property(planted):
    assert not_imperative(planted) == ["bed.rows:2 begins with Gives", "bed.rows:21 begins with The"]


def test_every_parameter_of_the_public_names_is_described(public):
    assert undescribed(public) == []


def test_every_name_to_know_has_an_example(public):
    assert without_example({name: public[name] for name in anybatch.__all__}) == []


def described(x, *, y=1, **more):
    """Add.

    Args:
        x: The first.
        y (int): The second.

    >>> described(1)
    """


def half(x, y):
    """Add.

    Args:
        x: The first.

    Returns:
        y: Not a parameter.
    """


@dataclass
class Result:
    """Result.

    Attributes:
        a: The first.
    """

    a: int
    b: int
    """The second."""
    c: int

    def show(self, width):
        """Show it."""

    def hide(self):
        """Hide it."""


class Called:
    """Adder.

    Args:
        x: The first.
        z: The argument of a call.
    """

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __call__(self, z):
        """Add."""

    def _secret(self, z):
        """Add."""


def test_parameters_without_a_description_are_found():
    assert undescribed({"described": described}) == []
    assert undescribed({"half": half, "Result": Result, "Called": Called}) == [
        "half does not describe y",
        "Result does not describe c",
        "Result.show does not describe width",
        "Called does not describe y",
    ]


def test_names_without_an_example_are_found():
    assert without_example({"described": described, "half": half}) == ["half has no example"]
