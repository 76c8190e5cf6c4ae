"""The rules of the rooms, each a function of a source tree that returns what breaks it, one sentence each.

A tree is the folder of one package. Its children are its rooms: folders with an `__init__`, and single files. A room's children
are its files and the rooms inside it.
"""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Tree:
    """The modules of a package, by dotted name relative to it: `batches.splits.by_rows`; a package is named as its folder."""

    root: Path

    @property
    def package(self) -> str:
        return self.root.name

    @cached_property
    def files(self) -> dict[str, Path]:
        return {self._name(path): path for path in sorted(self.root.rglob("*.py"))}

    @cached_property
    def syntax(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    @cached_property
    def rooms(self) -> set[str]:
        """Packages below the root."""
        return {name for name, path in self.files.items() if path.name == "__init__.py" and name}

    @cached_property
    def imports(self) -> list[tuple[str, str]]:
        """(importing module, imported module) within the tree, wherever in the file the import stands."""
        return [(name, target) for name, tree in self.syntax.items() for target in self._targets(tree)]

    @cached_property
    def exports(self) -> dict[str, list[str]]:
        """`__all__` of each module, empty where there is none."""
        return {name: _listed(tree) for name, tree in self.syntax.items()}

    def children(self, room: str) -> list[str]:
        prefix = f"{room}." if room else ""
        return [name for name in self.files if name.startswith(prefix) and name[len(prefix) :].count(".") == 0 and name]

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _targets(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, "imports are absolute"
                module = self._inside(node.module or "")
                for alias in node.names if module is not None else ():
                    submodule = f"{module}.{alias.name}".lstrip(".")
                    is_submodule = submodule in self.files and alias.name not in self.exports[module or ""]
                    yield submodule if is_submodule else module or ""
            elif isinstance(node, ast.Import):
                yield from (name for alias in node.names if (name := self._inside(alias.name)) is not None)

    def _inside(self, module: str) -> str | None:
        if module == self.package:
            return ""
        return module.removeprefix(f"{self.package}.") if module.startswith(f"{self.package}.") else None


def arrows_between_rooms(
    tree: Tree, order: Sequence[str], only: Mapping[str, Collection[str]], known: Collection[tuple[str, str]] = ()
) -> list[str]:
    """A room imports itself and those before it in `order`; `only` says it outright for some, `known` are exceptions."""
    rooms = {child.split(".")[0] for child in tree.files if child}
    found = [f"{room} is not in the list of rooms" for room in sorted(rooms - set(order))]
    found += [
        f"{name} no longer imports {target}: take it out of the list"
        for name, target in known
        if (name, target) not in tree.imports
    ]
    for name, target in tree.imports:
        if (name, target) in known:
            continue
        room, imported = name.split(".")[0], target.split(".")[0]
        if not room or not imported or room not in order or imported not in order:
            continue
        allowed = {room, *only[room]} if room in only else order[: order.index(room) + 1]
        if imported not in allowed:
            found.append(f"{name} imports {target}: {room} lies below {imported}")
    return found


def circles_inside_rooms(tree: Tree) -> list[str]:
    """The files and rooms inside a room can be put in an order in which each imports only those before it."""
    found = []
    for room in sorted(tree.rooms):
        graph: dict[str, set[str]] = {child: set() for child in tree.children(room)}
        reasons: dict[tuple[str, str], str] = {}
        for name, target in tree.imports:
            one, other = _child(room, name), _child(room, target)
            if one in graph and other in graph and one != other:
                graph[one].add(other)
                reasons.setdefault((one, other), f"{name} imports {target}")
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = error.args[1]  # each is imported by the next
            ways = [reasons.get((later, earlier), "") for earlier, later in pairwise(circle)]
            found.append(f"{room} goes round in a circle: {'; '.join(ways)}")
    return found


def doors_passed_by(tree: Tree, entries: Collection[str]) -> list[str]:
    """A room is imported as `package.room`, never past its `__init__`; `entries` are modules that may be named outright."""
    found = []
    for name, target in tree.imports:
        if target in entries:
            continue
        own = name if name in tree.rooms else name.rpartition(".")[0]
        if (target == own and name != own) or (target and own.startswith(f"{target}.")):
            found.append(f"{name} imports {target}, the door of its own room: name the file inside")
            continue
        door = _first_room_not_shared(tree, own, target)
        if door is not None and door != target:
            found.append(f"{name} imports {target} past the door {door}")
    return found


def exports_named_as_submodules(tree: Tree) -> list[str]:
    """`from package import name` would give the one or the other, by what was imported before."""
    found = []
    for room in sorted(tree.rooms):
        submodules = {child.rpartition(".")[2] for child in tree.children(room)}
        found += [
            f"{room} exports {name}, and has a submodule {name}" for name in tree.exports[room] if name in submodules
        ]
    return found


def unsorted_exports(tree: Tree) -> list[str]:
    """`__all__` is sorted as `sorted` sorts, and names each once."""
    return [
        f"{name or tree.package} has an __all__ that is not sorted"
        for name, listed in tree.exports.items()
        if listed != sorted(set(listed))
    ]


def _child(room: str, module: str) -> str:
    """The child of `room` that `module` is or is in; empty where it is in another room."""
    prefix = f"{room}."
    return prefix + module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else ""


def _first_room_not_shared(tree: Tree, own: str, target: str) -> str | None:
    """The outermost room that `target` is in and `own` is not."""
    parts = target.split(".")
    for count in range(1, len(parts) + 1):
        room = ".".join(parts[:count])
        if room in tree.rooms and own != room and not own.startswith(f"{room}."):
            return room
    return None


def _listed(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(value) for value in ast.literal_eval(node.value)]
    return []
