"""Results in a notebook: small tables in plain HTML. Every word that is put in is escaped, here and nowhere else."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from anybatch.core.display import short

_CELL = "text-align:left;padding:2px 12px 2px 0"


def html_block(title: str, *parts: str) -> str:
    """One result: its title in words, and parts that the other functions of this module made."""
    return f"<div><strong>{escape(title)}</strong>{''.join(parts)}</div>"


def sentences(texts: Iterable[str]) -> str:
    """A paragraph each."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts)


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table with a head; strings as they are, other values in short.

    >>> html_table(["a<b"], [["<script>"]])[-40:]
    '&lt;script&gt;</td></tr></tbody></table>'
    """
    head = "".join(f'<th scope="col" style="{_CELL}">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(_written(cell))}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts_table(facts: Mapping[str, Any]) -> str:
    """Names and values, a row each."""
    body = "".join(
        f'<tr><th scope="row" style="{_CELL}">{escape(name)}</th><td style="{_CELL}">{escape(_written(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table><tbody>{body}</tbody></table>"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else short(value)
