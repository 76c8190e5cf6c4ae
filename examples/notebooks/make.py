"""The notebooks of this folder, made from the examples beside it: `python examples/notebooks/make.py` writes and runs them."""

import ast
import os
import textwrap
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
NAMES = ("plain_loop", "causal_lm", "clip_like")


def notebook_of(name: str) -> nbformat.NotebookNode:
    """A cell of words, then a cell for each stretch of code between two empty lines; what runs as a script stands last."""
    source = (HERE.parent / f"{name}.py").read_text()
    words = ast.get_docstring(ast.parse(source)) or ""
    body = source.split('"""\n', 1)[1]
    code, _, script = body.partition('if __name__ == "__main__":\n')
    cells = [*code.strip().split("\n\n\n"), textwrap.dedent(script).strip()]
    book = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    )
    title, _, rest = words.partition("\n\n")
    book.cells = [nbformat.v4.new_markdown_cell(f"# {name.replace('_', ' ')}\n{title}\n\n{rest}".strip())]
    book.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
    for number, cell in enumerate(book.cells):
        cell["id"] = f"{name}-{number}"
    return book


def executed(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    client = NotebookClient(book, timeout=None, resources={"metadata": {"path": str(HERE)}})
    client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})  # models too small to share between threads
    return book


if __name__ == "__main__":
    for name in NAMES:
        nbformat.write(executed(notebook_of(name)), HERE / f"{name}.ipynb")
