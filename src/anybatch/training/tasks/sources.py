"""The functions of Python's own standard library, read from its sources on this machine."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODULES = (  # noqa: SIM905
    "argparse ast asyncio/base_events asyncio/streams base64 bdb bisect calendar cmd code codecs collections/__init__ "
    "configparser contextlib copy csv dataclasses datetime decimal difflib dis doctest email/message enum filecmp fileinput "
    "fnmatch fractions ftplib functools gettext glob gzip heapq hmac html/parser http/client http/cookiejar imaplib "
    "importlib/metadata/__init__ inspect io ipaddress json/decoder json/encoder locale logging/__init__ mailbox mimetypes "
    "multiprocessing/pool netrc nntplib ntpath numbers optparse os pdb pickle pickletools pkgutil platform plistlib poplib "
    "posixpath pprint profile pstats queue random reprlib sched selectors shelve shlex shutil smtplib socket socketserver "
    "ssl statistics string subprocess symtable tarfile telnetlib tempfile textwrap threading tokenize trace traceback "
    "turtle types typing unittest/case unittest/mock urllib/parse urllib/request uuid warnings wave weakref webbrowser "
    "xml/etree/ElementTree xml/dom/minidom xmlrpc/client zipapp zipfile"
).split()
"""Where to look; a module that this Python does not have is passed over."""


@dataclass(frozen=True, slots=True)
class Function:
    """One function or method of the standard library."""

    name: str
    source: str
    docstring: str
    """Empty where it has none."""
    body: str
    """The source below the docstring."""


@cache
def functions() -> tuple[Function, ...]:
    """Every function of `MODULES` in the order of the files: some 7,000, from one line to some hundred lines."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[Function] = []
    for module in MODULES:
        path = folder / f"{module}.py"
        if path.is_file():
            found += _functions_of(path.read_text(encoding="utf-8"))
    return tuple(found)


def is_held_out(number: int) -> bool:
    """Every tenth function is kept for validation."""
    return number % 10 == 9


def _functions_of(text: str) -> list[Function]:
    lines = text.splitlines()
    nodes = [node for node in _statements(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [_function(node, lines) for node in sorted(nodes, key=lambda node: node.lineno)]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node: functions are statements, and `ast.walk` goes through all expressions too."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements(child)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function:
    docstring = ast.get_docstring(node) or ""
    below = node.body[1:] if docstring else node.body
    last = node.end_lineno or node.lineno
    body = lines[below[0].lineno - 1 : last] if below else []
    return Function(node.name, "\n".join(lines[node.lineno - 1 : last]), docstring, "\n".join(body))
