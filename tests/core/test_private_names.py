"""The private names of torch that we use: they are there, each has a test, and only `torch_private*.py` use them.

A new release of torch fails here with the list of names that it moved. Names are read from the source, because importing
them stops at the first that is gone.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(str(find_spec("anybatch").origin)).parent
INSIDE = [
    SOURCE / "core" / "torch_private.py",
    SOURCE / "parallel" / "torch_private_ddp.py",
    SOURCE / "parallel" / "torch_private_fsdp.py",
]
PUBLIC = {
    *("NEWEST", "LOW_PRECISION", "warn_of_newer", "demand", "is_low", "number_in", "at_least_fp32"),
    *("leaves_of", "nodes_named", "places_behind", "is_sharded", "own_part", "Groups", "Grouped"),
}
"""Names in these modules that stand for nothing private of torch."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a file imports from torch under a private name: the module, and the name in it."""
    for node in ast.walk(tree):
        modules = {node.module or "": node.names} if isinstance(node, ast.ImportFrom) else {}
        if isinstance(node, ast.Import):
            modules = {alias.name: [ast.alias("")] for alias in node.names}
        for module, names in modules.items():
            parts = module.split(".")
            for alias in names if parts[0] == "torch" else ():
                if any(map(_is_private, [*parts, alias.name])):
                    yield module, alias.name


def _dotted(tree: ast.AST) -> Iterator[str]:
    """Private attributes of torch's own modules: "torch._foreach_mul_"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            whole = ast.unparse(node)
            if whole.startswith("torch."):
                yield whole


_TREE = ast.parse("\n".join(path.read_text() for path in INSIDE))


# --- every name is there


@pytest.mark.parametrize(("module", "name"), [*_imports(_TREE), ("torch.multiprocessing.reductions", "StorageWeakRef")])
def test_torch_has_the_name(module: str, name: str):
    assert hasattr(import_module(module), name), f"torch {torch.__version__} has no {module}.{name}"


@pytest.mark.parametrize("dotted", sorted(set(_dotted(_TREE))))
def test_torch_has_the_attribute(dotted: str):
    found: Any = torch
    for part in dotted.split(".")[1:]:
        assert hasattr(found, part), f"torch {torch.__version__} has no {dotted}"
        found = getattr(found, part)


def _defined() -> set[str]:
    """The names that these modules define or hand on."""
    names: set[str] = set()
    for node in _TREE.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node.value, ast.List):
                names |= {item.value for item in node.value.elts if isinstance(item, ast.Constant)}
    return {name for name in names if not name.startswith("_")} - PUBLIC


def test_every_private_name_has_a_test():
    here = Path(__file__).parent
    files = [here / "test_torch_private.py", here.parent / "parallel" / "test_inside_ddp_and_fsdp.py"]
    nodes = [
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    ]
    tested = {node.attr for node in nodes if ast.unparse(node.value) == "inside"}
    assert _defined() - tested == set()


# --- and no other module uses one


def _used_inside() -> set[str]:
    """Attributes that these modules reach for, as such or by name, that nobody else may reach for."""
    names = {node.attr for node in ast.walk(_TREE) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(_TREE) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    undocumented = {"kineto_results", "fsdp_params", "mesh_info", "unsharded_param", "unsharded_accumulated_grad"}
    undocumented |= {"require_forward_param_sync", "will_sync_module_buffers", "StorageWeakRef", "FakeTensorMode"}
    return {name for name in names if _is_private(name)} | undocumented


@cache
def _of_our_own() -> frozenset[str]:
    """Private names that some class or module of anybatch defines, and those of every named tuple."""
    names = {"_fields", "_replace", "_asdict"}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
                own = [target for target in targets if isinstance(target, ast.Attribute)]
                names |= {target.attr for target in own if ast.unparse(target.value) == "self"}
    return frozenset(names)


def _used_privately(tree: ast.AST, known: set[str], own: frozenset[str]) -> Iterator[str]:
    yield from (f"{module}.{name}" for module, name in _imports(tree))
    yield from _dotted(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "sys"):
            if node.attr in known or (_is_private(node.attr) and node.attr not in own):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            yield repr(node.value)


def test_no_other_module_uses_a_private_name_of_torch():
    known, own = _used_inside(), _of_our_own()
    found = {
        f"{path.relative_to(SOURCE)}: {used}"
        for path in SOURCE.rglob("*.py")
        if path not in INSIDE
        for used in _used_privately(ast.parse(path.read_text()), known, own)
    }
    assert not found, "give each an alias in core/torch_private.py:\n" + "\n".join(sorted(found))


@pytest.mark.parametrize(
    "line",
    [
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch._subclasses import FakeTensor",
        "import torch._dynamo",
        "torch._foreach_add_(values, 1)",
        "version = tensor._version",
        "hasattr(model, '_orig_mod')",
        "handle = model._forward_hooks",
        "events = profiler.profiler.kineto_results.events()",
    ],
)
def test_private_names_are_seen_in_the_source(line: str):
    assert list(_used_privately(ast.parse(line), _used_inside(), _of_our_own()))


def test_fully_shard_is_not_imported_with_the_private_names():
    imports = [ast.unparse(node) for node in _TREE.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("torch.distributed" in line for line in imports)
