"""Names of a package that are loaded one by one, each when it is first asked for.

A package that uses this lists its names once, as ordinary imports below `if TYPE_CHECKING:`. Type checkers read them there, and
so does this module at run time. `from anybatch.training import Settings` then loads the settings, and no torch.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from anybatch.faces import did_you_mean

Home = tuple[str, str | None]
"""A module, and the name of something in it; None for the module itself."""


@cache
def homes(module: str) -> dict[str, Home]:
    """Where each name comes from that the source of `module` imports from anybatch."""
    spec = find_spec(module)
    source = None if spec is None or spec.loader is None else spec.loader.get_source(module)  # type: ignore[attr-defined]
    if source is None:
        raise ImportError(
            f"{module} lists its names in its source, which is not there. Install anybatch with its .py files."
        )
    found: dict[str, Home] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anybatch.") and node.module != __name__:
            found |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: (alias.name, None) for alias in node.names if alias.asname is not None}
    return found


def lazily(package: str, listed_in: str = "") -> Callable[[str], Any]:
    """A `__getattr__` for `package`: it loads the module of the name that is asked for, and of no other.

    The names are those that the module `listed_in` imports, `package` itself where nothing is given.
    """

    def load(name: str) -> Any:
        known = {} if name.startswith("__") else homes(listed_in or package)
        if name not in known:
            hint = did_you_mean(name, known) or "."
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(known))}{hint}")
        module, attribute = known[name]
        value = import_module(module) if attribute is None else getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)  # the next look finds it without this function
        return value

    return load
