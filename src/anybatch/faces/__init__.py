"""How values show themselves to a person: in a line, in a notebook; and the name that somebody meant."""

from anybatch.faces.in_a_line import called, name_of, one_line, short
from anybatch.faces.nearest_name import did_you_mean, one_of
from anybatch.faces.notebook_html import facts_table, html_block, html_table, sentences

__all__ = [
    "called",
    "did_you_mean",
    "facts_table",
    "html_block",
    "html_table",
    "name_of",
    "one_line",
    "one_of",
    "sentences",
    "short",
]
