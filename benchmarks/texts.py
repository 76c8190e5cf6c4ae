"""Rows of different lengths: functions of Python's standard library as bytes, and synthetic laws of length."""

import ast
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LONGEST = 1024
Sample = dict[str, list[int]]


@cache
def stdlib_functions() -> tuple[bytes, ...]:
    """The source of every function in the standard library's top-level modules, in order of file and line."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_bytes()
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                found.append(b"".join(lines[node.lineno - 1 : node.end_lineno]))
    return tuple(found)


def log_normal(sigma: float) -> Callable[[int, torch.Generator], Tensor]:
    """Lengths with a median of 32 tokens, 512 at most."""

    def draw(rows: int, chance: torch.Generator) -> Tensor:
        return torch.empty(rows).log_normal_(3.466, sigma, generator=chance).clamp(4, 512).long()

    return draw


def bimodal(rows: int, chance: torch.Generator) -> Tensor:
    """Nine rows in ten are about 24 tokens long, the tenth about 384."""
    short = torch.randn(rows, generator=chance) * 6 + 24
    long = torch.randn(rows, generator=chance) * 40 + 384
    is_long = torch.rand(rows, generator=chance) < 0.1
    return torch.where(is_long, long, short).clamp(4, 512).long()


def constant(rows: int, chance: torch.Generator) -> Tensor:
    """Nothing to gain: every row is 64 tokens long."""
    return torch.full((rows,), 64)


LAWS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "log-normal 1.0": log_normal(1.0),
    "log-normal 0.5": log_normal(0.5),
    "bimodal": bimodal,
    "constant": constant,
}


def draw(law: str, rows: int, seed: int) -> list[Sample]:
    """A batch of raw samples: random bytes of the law's lengths, or "stdlib" functions, cut at `LONGEST` bytes."""
    chance = torch.Generator().manual_seed(seed)
    if law == "stdlib":
        functions = stdlib_functions()
        chosen = torch.randperm(len(functions), generator=chance)[:rows].tolist()
        texts = [list(functions[index][:LONGEST]) for index in chosen]
    else:
        lengths = LAWS[law](rows, chance).tolist()
        texts = [torch.randint(0, 256, (length,), generator=chance).tolist() for length in lengths]
    return [{"input_ids": text, "labels": text} for text in texts]


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """Pad to the longest of these samples."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels = torch.full((len(samples), longest), -100)
    mask = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = torch.tensor(sample["input_ids"])
        mask[row, :length] = 1
    labels[:, 0] = -100  # nothing predicts the first token; the Trainer would count it in models that it does not know
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
