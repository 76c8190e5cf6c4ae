"""The ES modules of the lessons, inlined: an import map whose addresses are the modules themselves.

A page that is opened from disk may not import from other files, but it may import from `data:` addresses. No bundler is needed.
"""

import json
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

ESCAPES = {"%": "%25", "\n": "%0A", "\t": "%09", "#": "%23", "<": "%3C", '"': "%22", "\\": "%5C"}
"""What a `data:` address, a JSON string or a script element would not leave as it is."""


def web_file(name: str) -> str:
    """The text of a file of `lessons/web/`."""
    return files("anybatch.lessons").joinpath("web", *name.split("/")).read_text("utf-8")


@cache
def web_modules() -> dict[str, str]:
    """The source of every module, by the name it is imported by: `ab/run` is the file `run.js`, in whichever folder."""
    return {f"ab/{path.name.removesuffix('.js')}": path.read_text("utf-8") for path in _scripts(_root())}


def module_paths() -> dict[str, str]:
    """The path of every module below `web/`, for a site that serves them as files."""
    folders = [folder for folder in _root().iterdir() if folder.is_dir()]
    return {
        f"ab/{path.name.removesuffix('.js')}": f"{folder.name}/{path.name}"
        for folder in folders
        for path in _scripts(folder)
    }


def inline_import_map() -> str:
    """JSON of an import map that holds all modules; it can stand in a script element as it is.

    >>> "%3C" in inline_import_map(), "<" in inline_import_map()
    (True, False)
    """
    return json.dumps({"imports": {name: _address(source) for name, source in web_modules().items()}})


def _root() -> Traversable:
    return files("anybatch.lessons").joinpath("web")


def _scripts(folder: Traversable) -> list[Traversable]:
    found: list[Traversable] = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            found += _scripts(entry)
        elif entry.name.endswith(".js"):
            found.append(entry)
    return found


def _address(source: str) -> str:
    """Lines lose their indentation and those that are comments alone: a page need not carry them."""
    lines = (line.strip() for line in source.splitlines())
    text = "\n".join(line for line in lines if line and not line.startswith("//"))
    return "data:text/javascript;charset=utf-8," + "".join(ESCAPES.get(letter, letter) for letter in text)
