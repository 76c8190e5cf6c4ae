"""The rules of docstrings, each a function that returns what breaks it, one sentence each.

The first words are read from the files of a tree. Descriptions of parameters are read from the imported names, because
decorators and base classes decide what `help()` shows.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from textwrap import dedent
from typing import Any

from tests.house.structure import Tree

RIDDLES = r"What|Who|Whose|Which|Those|That|Of|How|Where|With|For"
"""No docstring begins with these words: the subject of the sentence is missing."""
NOT_IMPERATIVE = (
    r"A|An|The|Its|Adds|Asks|Builds|Calls|Checks|Computes|Counts|Creates|Does|Finds|Gets|Gives|Has|Holds|Is|Keeps|Makes|Moves|"
    r"Puts|Raises|Reads|Returns|Runs|Says|Sets|Shows|Splits|Takes|Tells|Turns|Writes|Yields"
)
"""No docstring of a function begins with these words, because it begins with an imperative."""
DESCRIBED_BY_NOUN = r"property|contextmanager|setter"
"""Decorators of functions that are used like attributes or objects."""


def riddles(tree: Tree) -> list[str]:
    return [f"{place} begins with {text.split()[0]}" for place, text, _ in docstrings(tree) if begins(text, RIDDLES)]


def not_imperative(tree: Tree) -> list[str]:
    return [
        f"{place} begins with {text.split()[0]}"
        for place, text, is_action in docstrings(tree)
        if is_action and begins(text, NOT_IMPERATIVE)
    ]


def begins(text: str, words: str) -> bool:
    return re.match(rf"({words})\b(?!-)", text.strip()) is not None


def docstrings(tree: Tree) -> Iterator[tuple[str, str, bool]]:
    """Yield (place, text, is of a function that does something) of every docstring, those of attributes among them."""
    for name, path in tree.files.items():
        for owner in ast.walk(ast.parse(path.read_text())):
            is_action = isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef) and not owner.name.startswith("__")
            decorators = " ".join(map(ast.unparse, getattr(owner, "decorator_list", [])))
            for statement in owner.body if hasattr(owner, "body") and isinstance(owner.body, list) else []:
                if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                    place = f"{name or tree.root.name}:{statement.lineno}"
                    yield place, statement.value.value, is_action and not re.search(DESCRIBED_BY_NOUN, decorators)


def undescribed(names: Mapping[str, Any]) -> list[str]:
    """Every parameter of a public callable is in `Args:`, in an attribute docstring, or named in a sentence in backticks."""
    found = []
    for name, value in names.items():
        if inspect.isclass(value):
            found += _missing(name, _constructor_parameters(value), _class_docs(value))
            for method, function in inspect.getmembers(value, inspect.isroutine):
                if _is_of_package(function, value) and (method == "__call__" or not method.startswith("_")):
                    docs = inspect.getdoc(function) or ""
                    called = f"\n\n{_class_docs(value)}" if method == "__call__" else ""
                    found += _missing(f"{name}.{method}", _parameters(function), docs + called)
        elif inspect.isroutine(value):
            found += _missing(name, _parameters(value), inspect.getdoc(value) or "")
    return found


def without_example(names: Mapping[str, Any]) -> list[str]:
    """Every docstring has an example, as a doctest or as a fenced block."""
    return [f"{name} has no example" for name, value in names.items() if not re.search(">>>|```", value.__doc__ or "")]


def _missing(name: str, wanted: list[str], docs: str) -> list[str]:
    sections = re.findall(r"^(?:Args|Attributes):\n((?:[ \t]+.*\n?|\n)*)", docs, re.MULTILINE)
    entries = re.findall(r"^\s+([\w*, ]+?)(?: \(.*?\))?:", "\n".join(sections), re.MULTILINE)
    entries += re.findall(r"`[^`]*`", docs)  # named in a sentence, which is enough for a short method
    described = {word for entry in entries for word in re.findall(r"\w+", entry)}
    return [f"{name} does not describe {parameter}" for parameter in wanted if parameter not in described]


def _parameters(function: Callable[..., Any]) -> list[str]:
    known = [one for one in inspect.signature(function).parameters.values() if one.name not in ("self", "cls")]
    return [one.name for one in known if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and one.name[0] != "_"]


def _constructor_parameters(value: type) -> list[str]:
    if is_dataclass(value):
        return [field.name for field in fields(value) if field.init and not field.name.startswith("_")]
    if hasattr(value, "_fields"):
        return list(value._fields)
    is_protocol = getattr(value, "_is_protocol", False)
    return _parameters(value.__init__) if _is_of_package(value.__init__, value) and not is_protocol else []


def _class_docs(value: type) -> str:
    docs = [inspect.cleandoc(value.__doc__ or ""), inspect.getdoc(value.__init__) or "", "Attributes:"]
    for cls in (cls for cls in value.__mro__ if _is_of_package(cls, value)):
        (definition,) = ast.parse(dedent(inspect.getsource(cls))).body
        for before, after in pairwise(definition.body):
            if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
                docs.append(f"    {ast.unparse(before.target)}: {ast.unparse(after)}")
    return "\n".join(docs)


def _is_of_package(value: Any, cls: type) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == cls.__module__.partition(".")[0]
