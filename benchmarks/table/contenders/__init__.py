"""One module per contender, imported only in the process that runs it. Each has the same small face:

learn(case, model, optimizer) -> Learnt     train as its documentation says, `case.epochs` times over the rows
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch import Coupled
from benchmarks.table.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What is left when a contender is through."""

    scheduler: LRScheduler | None = None
    note: str = ""
    """What a reader of the cell has to know."""


Learn = Callable[[Case, nn.Module, Optimizer], Learnt]
Refuses = Callable[[Case], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One column of the table."""

    module: str
    title: str
    function: str = "learn"
    """Of the module: `learn_exact` is the framework with anybatch in it."""
    package: str | None = None
    kinds: tuple[str, ...] = ("any",)
    """The kinds of cases that are its own; of others it has no cell."""
    refuses: Refuses = lambda case: None
    """Why it cannot be asked, if so."""
    needs_launcher: bool = False
    """Even one process is started as a group of ranks."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.function}"

    def load(self) -> Learn:
        learn: Learn = getattr(importlib.import_module(f"{__name__}.{self.module}"), self.function)
        return learn


def _one_process(case: Case) -> str | None:
    return "one process only" if case.ranks > 1 else None


def _contrastive(case: Case) -> str | None:
    return None if isinstance(case.objective, Coupled) else "contrastive losses only"


def _cached(case: Case) -> str | None:
    return _one_process(case) or _contrastive(case)


def _no_fp16(case: Case) -> str | None:
    return "its loss scale is for fp16: 'not supported on your device'" if case.is_scaled else None


def _no_contrast(case: Case) -> str | None:
    return "a contrastive loss is no mean over rows: Update with Coupled" if not _contrastive(case) else None


_exact = partial(Contender, function="learn_exact")
HEADS, PAIRS, TRL = ("any", "head"), ("any", "pairs"), ("SFT", "DPO")
CONTENDERS = [
    Contender(module="at_once", title="whole batch at once", kinds=(*HEADS, *TRL, "pairs"), refuses=_one_process),
    Contender(module="textbook", title="textbook loop"),
    Contender(module="with_accelerate", title="Accelerate", package="accelerate", kinds=HEADS),
    Contender(module="hf_trainer", title="HF Trainer", package="transformers", kinds=HEADS),
    Contender(module="with_lightning", title="Lightning", package="lightning", kinds=HEADS),
    Contender(module="with_deepspeed", title="DeepSpeed", package="deepspeed", refuses=_no_fp16, needs_launcher=True),
    Contender(module="cached_loss", title="cached loss", package="sentence-transformers", refuses=_cached),
    Contender(module="trl_trainer", title="TRL", package="trl", kinds=TRL),
    Contender(module="sentence_trainer", title="sentence-transformers", kinds=PAIRS, refuses=_contrastive),
    _exact(module="hf_trainer", title="HF Trainer + anybatch", kinds=HEADS, refuses=_no_contrast),
    _exact(module="trl_trainer", title="TRL + anybatch", kinds=TRL),
    _exact(module="with_lightning", title="Lightning + anybatch", kinds=HEADS, refuses=_no_contrast),
    _exact(module="with_accelerate", title="Accelerate + anybatch", kinds=HEADS),
    _exact(module="sentence_trainer", title="sentence-transformers + anybatch", kinds=PAIRS, refuses=_contrastive),
    Contender(module="with_anybatch", title="anybatch", package="anybatch"),
]
