"""Words to HTML: paragraphs, lists, code, emphasis, and claims, whose numbers are marked so that a test can read them."""

import html
import re
from collections.abc import Mapping

from anybatch.lessons.pages.lesson_content import Claim


def to_html(text: str, claims: Mapping[str, Claim]) -> str:
    """Blocks are apart by empty lines; a block of four spaces is code, of dashes a list, of a tag is left as it is.

    >>> to_html("It *adds*.\\n\\n- `one`\\n- two", {})
    '<p>It <em>adds</em>.</p><ul><li><code>one</code></li><li>two</li></ul>'
    """
    return "".join(_block(block, claims) for block in re.split(r"\n\s*\n", text.strip("\n")) if block.strip())


def inline(text: str, claims: Mapping[str, Claim]) -> str:
    """One line of words.

    >>> inline("{lost} of **1,000** rows", {"lost": Claim(shown="752", measure="lost")})
    '<data data-claim="lost" value="752">752</data> of <strong>1,000</strong> rows'
    """
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(_code(piece) if piece.startswith("`") else _prose(piece, claims) for piece in pieces)


def _block(block: str, claims: Mapping[str, Claim]) -> str:
    lines = block.split("\n")
    if block.startswith("<"):
        return _numbers(block, claims)
    if all(line.startswith("    ") for line in lines):
        code = "\n".join(line[4:] for line in lines)
        return f'<pre tabindex="0"><code>{html.escape(code)}</code></pre>'
    if lines[0].startswith("- "):
        items = re.split(r"\n- ", block[2:])
        return "<ul>" + "".join(f"<li>{inline(' '.join(item.split()), claims)}</li>" for item in items) + "</ul>"
    if lines[0].startswith("### "):
        return f"<h3>{inline(lines[0][4:], claims)}</h3>"
    return f"<p>{inline(' '.join(block.split()), claims)}</p>"


def _code(piece: str) -> str:
    return f"<code>{html.escape(piece[1:-1])}</code>"


def _prose(piece: str, claims: Mapping[str, Claim]) -> str:
    text = html.escape(piece, quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\*(.+?)\*", r"<em>\1</em>", text)
    text = re.sub(r"\[(.+?)\]\((#\w+)\)", r'<a href="\2">\1</a>', text)
    return _numbers(text, claims)


def _numbers(text: str, claims: Mapping[str, Claim]) -> str:
    def number(found: re.Match[str]) -> str:
        shown = html.escape(claims[found[1]].shown)
        return f'<data data-claim="{found[1]}" value="{shown}">{shown}</data>'

    return re.sub(r"\{(\w+)\}", number, text)
