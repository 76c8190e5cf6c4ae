"""Make the notebooks from the examples: `python examples/notebooks/make.py` writes and runs them."""

import ast
import os
import textwrap
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
NAMES = ("plain_loop", "causal_lm", "clip")


def notebook_of(name: str) -> nbformat.NotebookNode:
    """Return a cell for the docstring, one for each top-level block, and one for the `__main__` block."""
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
    client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})  # the models are too small for several threads
    return book


if __name__ == "__main__":
    for name in NAMES:
        nbformat.write(executed(notebook_of(name)), HERE / f"{name}.ipynb")
