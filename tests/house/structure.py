"""The rules of the source tree, each a function of a tree that returns what breaks it, one sentence each.

A tree is the folder of one Python package. Its parts are the sub-packages and modules directly below it; the parts of `app` are
taken one level deeper, because `app` is a collection of programs. Imports below `if TYPE_CHECKING:` name types only and are not
looked at.
"""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One imported name: who imports it, from which module, and whether it happens when the importer is loaded."""

    importer: str
    module: str
    name: str
    is_at_load: bool


@dataclass(frozen=True)
class Tree:
    """The modules of a package, by dotted name relative to it: `core.batch`; a package is named as its folder."""

    root: Path
    collections: tuple[str, ...] = ("app",)

    @cached_property
    def files(self) -> dict[str, Path]:
        return {self._name(path): path for path in sorted(self.root.rglob("*.py"))}

    @cached_property
    def imports(self) -> list[Import]:
        found = []
        for name, path in self.files.items():
            for node, is_at_load in _import_nodes(ast.parse(path.read_text())):
                found += [Import(name, *target, is_at_load) for target in self._targets(node)]
        return found

    def part(self, module: str) -> str:
        """The package or module below the root that `module` belongs to; "" for the root itself."""
        first, _, rest = module.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first in self.collections and rest else first

    def num_lines(self, part: str) -> int:
        return sum(
            len(path.read_text().splitlines()) for name, path in self.files.items() if f"{name}.".startswith(f"{part}.")
        )

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _targets(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
        package = self.root.name
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from ((name.removeprefix(f"{package}."), "") for name in names if name.startswith(f"{package}."))
        elif node.module == package or (node.module or "").startswith(f"{package}."):
            module = (node.module or "").removeprefix(package).lstrip(".")
            for alias in node.names:
                submodule = f"{module}.{alias.name}".lstrip(".")
                is_module = submodule in self.files and alias.name not in self._names(module)
                yield (submodule, "") if is_module else (module, alias.name)

    def _names(self, module: str) -> set[str]:
        """The names that a module imports, which a package of that name hands on."""
        tree = ast.parse(self.files[module].read_text()) if module in self.files else ast.Module([], [])
        nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != self.root.name]
        return {alias.asname or alias.name for node in nodes for alias in node.names}


def upward_imports(
    tree: Tree, order: Sequence[str], loaders: Collection[str] = (), only: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """A part imports itself and those before it in `order`. `loaders` may import any part inside functions; `only` says it
    outright for some parts."""
    parts = {tree.part(name) for name in tree.files} - {"", *tree.collections}
    found = [f"{part} is not in the list of parts" for part in sorted(parts - set(order))]
    for one in tree.imports:
        part, imported = tree.part(one.importer), tree.part(one.module)
        if part in ("", *tree.collections) or imported in ("", part) or {part, imported} - set(order):
            continue
        if one.importer in loaders and not one.is_at_load:
            continue
        allowed = (only or {}).get(part, order[: order.index(part)])
        if imported not in allowed:
            found.append(f"{one.importer} imports {one.module}: {imported} is not below {part}")
    return sorted(set(found))


def imports_past_the_init(tree: Tree, modules: Collection[str] = ()) -> list[str]:
    """A package is imported by its own name, never a module inside it; `modules` may be named outright."""
    found = set()
    for one in tree.imports:
        part, imported = tree.part(one.importer), tree.part(one.module)
        is_other = imported not in ("", part) and imported.split(".")[0] not in tree.collections
        if is_other and part and one.module != imported and one.module not in modules:
            found.add(f"{one.importer} imports {one.module} past {imported}/__init__.py")
    return sorted(found)


def private_imports(tree: Tree) -> list[str]:
    """No module imports a name that begins with an underscore from another part of the tree."""
    return [
        f"{one.importer} imports {one.module}.{one.name}, which is private"
        for one in tree.imports
        if one.name.startswith("_")
        and not one.name.startswith("__")
        and tree.part(one.importer) != tree.part(one.module)
    ]


def import_cycles(tree: Tree) -> list[str]:
    """Modules can be put in an order in which each loads only those before it."""
    graph: dict[str, set[str]] = {name: set() for name in tree.files}
    for one in tree.imports:
        if one.is_at_load and one.module in graph and one.module != one.importer:
            graph[one.importer].add(one.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" is imported by ".join(name or tree.root.name for name in error.args[1])]
    return []


def over_budget(tree: Tree, budget: Mapping[str, int]) -> list[str]:
    """No part has more lines than its budget, and every part has one."""
    parts = sorted({tree.part(name) for name in tree.files} - {"", *tree.collections})
    found = [f"{part} has no budget" for part in parts if part not in budget]
    for part in parts:
        lines = tree.num_lines(part)
        if lines > budget.get(part, lines):
            found.append(f"{part} has {lines} lines, and {budget[part]} are its budget")
    return found


def _import_nodes(node: ast.AST, is_at_load: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, is_at_load
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _import_nodes(child, is_at_load and not is_function)
