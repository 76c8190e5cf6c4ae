"""A byte-level language model on the functions of Python's own standard library: real, ragged text.

Rows are padded to the longest of their batch; the loss ignores padding, and units are the predicted bytes. `Tokens` puts rows
of similar length together and trims their padding. Its cost is given, not learnt, so that a seed determines the weights.
"""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.app.training.tasks.task import Task
from anybatch.core import Mean, supervised
from anybatch.ragged import Cost, Tokens

LONGEST = 256  # bytes of a row; longer functions are truncated
END = 256  # the token after the 256 bytes
IGNORED = -100
WIDTH = 96


def task() -> Task:
    sources = (function.source.encode()[: LONGEST - 1] for function in functions()[::3])
    rows = [torch.tensor([END, *source, END]) for source in sources]
    model = ByteModel()
    return Task(
        model=model,
        # the bias of keys has rounding for a gradient; the usual eps of 1e-8 would make whole steps of it
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.05),
        objective=supervised(ByteLoss(), units=predicted_bytes, metrics=next_byte),
        training=[row for number, row in enumerate(rows) if not is_held_out(number)],
        validation=[row for number, row in enumerate(rows) if is_held_out(number)],
        metric="next_byte",
        collate=pad,
        batch_size=32,
        micro_batch=8,
        lengths=lambda rows: [len(row) - 1 for row in rows],
        split=Tokens(8 * LONGEST, length=bytes_of_rows, cost=Cost()),
        epochs=2,
        warmup=10,
        decay="cosine",
        clip_norm=1.0,
        validation_batch=16,
    )


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(END + 1, WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.byte, self.position):
            nn.init.normal_(table.weight, std=0.02)  # the byte embedding is also the output layer

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        states = self.byte(text) + self.position(torch.arange(length, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        states = self.norm(self.layers(states, mask=mask, is_causal=True))
        return F.linear(states, self.byte.weight)


class ByteLoss(nn.Module):
    """Mean cross-entropy over all bytes but padding."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def predicted_bytes(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Count the targets that the mean loss divides by."""
    return (batch[1] != IGNORED).count_nonzero()


def bytes_of_rows(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the length of each row without padding."""
    return (batch[1] != IGNORED).sum(dim=1)


def next_byte(logits: Tensor, targets: Tensor) -> dict[str, Mean]:
    is_real = targets != IGNORED
    return {"next_byte": Mean((logits.argmax(dim=-1) == targets)[is_real].float().mean())}


def pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Collate rows of bytes into (inputs, targets); targets are the inputs shifted by one byte."""
    inputs = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=END)
    targets = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)
    return inputs, targets


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
"""Files to read, if this Python has them."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method; `body` is the source below the docstring, which may be empty."""

    source: str
    docstring: str
    body: str


@cache
def functions() -> tuple[Function, ...]:
    """Return the functions of `MODULES` in the order of the files: about 7,000."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for module in MODULES if (path := folder / f"{module}.py").is_file()]
    return tuple(function for path in paths for function in _functions_of(path.read_text(encoding="utf-8")))


def is_held_out(number: int) -> bool:
    return number % 10 == 9


def _functions_of(text: str) -> Iterator[Function]:
    lines = text.splitlines()
    nodes = [node for node in _statements(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in sorted(nodes, key=lambda node: node.lineno):
        docstring = ast.get_docstring(node) or ""
        below = node.body[1:] if docstring else node.body
        body = lines[below[0].lineno - 1 : node.end_lineno] if below else []
        source = lines[node.lineno - 1 : node.end_lineno]
        yield Function("\n".join(source), docstring, "\n".join(body))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement below a node. `ast.walk` also visits expressions, which takes longer."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements(child)
