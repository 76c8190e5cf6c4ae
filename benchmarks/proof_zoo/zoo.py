"""Registry of setups, and the parts that several of them share."""
import dataclasses, importlib.util, pathlib, sys
from typing import Any, Callable
import torch, torch.nn.functional as F
from torch import nn

HERE = pathlib.Path(__file__).parent
ZOO: dict[str, "Entry"] = {}


@dataclasses.dataclass
class Entry:
    name: str
    verdict: str                 # sound | broken | unjudged
    build: Callable
    kind: str = ""               # the kind of mistake, in words
    accept: str = ""             # regex on the kind of the first cause
    text: str = ""               # or: regex on its explanation and fix (lower case), where the kind may be any
    literal: bool = False        # whether the printed fix can be applied literally
    note: str = ""
    exact_ok: bool = False       # unjudged: exact is right too


@dataclasses.dataclass
class S:
    model: nn.Module
    objective: Any
    batch: Any
    loss: Callable | None = None          # plain (model, batch) -> scalar, for fixes that replace the objective
    units: Callable | None = None         # as the objective is told (None: rows)
    reduction: str = "mean"
    micro_batch: Any = 3
    options: dict = dataclasses.field(default_factory=dict)
    coupled: tuple | None = None          # (encode, loss): what a fix by Coupled means here
    right_units: Callable | None = None   # what a fix in words ("a count of exactly the targets ...") comes to, by hand
    names: dict = dataclasses.field(default_factory=dict)   # names that a printed fix may use
    watch: Callable | None = None         # state outside the model that verify must leave alone


def _add(verdict, name, kind="", accept="", text="", literal=False, note="", exact_ok=False):
    def wrap(f):
        n = name or f.__name__
        assert n not in ZOO, n
        ZOO[n] = Entry(n, verdict, f, kind, accept, text, literal, note, exact_ok)
        return f
    return wrap


def sound(name=None, note=""):
    return _add("sound", name, note=note)


def broken(name=None, kind="", accept="", text="", literal=False, note=""):
    return _add("broken", name, kind, accept, text, literal, note)


def unjudged(name=None, kind="", accept="", text="", note="", exact_ok=False):
    return _add("unjudged", name, kind, accept, text, False, note, exact_ok)


def load():
    for folder in ("sound", "broken", "unjudged"):
        for path in sorted((HERE / folder).glob("*.py")):
            spec = importlib.util.spec_from_file_location(f"{folder}_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    return ZOO


# ---- little makers
def mlp(i=5, h=8, o=3):
    return nn.Sequential(nn.Linear(i, h), nn.Tanh(), nn.Linear(h, o))


def xy(n=11, d=5, c=3):
    return torch.randn(n, d), torch.randint(0, c, (n,))


def reg(n=11, d=5, o=3):
    return torch.randn(n, d), torch.randn(n, o)


def obj(model, loss, batch, units=None, reduction="mean", **kw):
    from anybatch import Objective
    o = Objective(loss, reduction=reduction) if units is None else Objective(loss, units=units, reduction=reduction)
    return S(model, o, batch, loss=loss, units=units, reduction=reduction, **kw)


def coup(model, encode, loss, batch, **kw):
    from anybatch import Coupled
    return S(model, Coupled(encode, loss), batch, coupled=(encode, loss), **kw)


def ce(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def tokens(n=10, t=9, v=12, low=2):
    lengths = torch.randint(low, t + 1, (n,))
    lengths[0] = t
    return torch.randint(1, v, (n, t)).masked_fill(torch.arange(t) >= lengths[:, None], -100), lengths


def lm(v=12):
    return nn.Sequential(nn.Embedding(v, 6), nn.Tanh(), nn.Linear(6, v))


def next_token(model, batch):
    y = batch["labels"]
    return F.cross_entropy(model(y.clamp(min=0)[:, :-1]).flatten(0, 1), y[:, 1:].flatten())


def pairs(n=12):
    x = torch.randn(n, 5)
    return x, x + 0.1 * torch.randn(n, 5)


def padded(n=10, t=8):
    mask = (torch.arange(t) < torch.randint(1, t + 1, (n,))[:, None]).long()
    mask[0] = 1
    return {"input_ids": torch.randint(1, 20, (n, t)) * mask, "attention_mask": mask}


class Hidden(nn.Module):
    """Two linear layers; `f(model, x)` is the forward."""
    def __init__(self, f):
        super().__init__()
        self.a, self.b, self.f = nn.Linear(5, 6), nn.Linear(6, 3), f

    def forward(self, x):
        return self.f(self, x)


class TokensAndRow(nn.Module):
    """A head for each token and one for the row."""
    def __init__(self):
        super().__init__()
        self.emb, self.t, self.r = nn.Embedding(12, 6), nn.Linear(6, 12), nn.Linear(6, 3)

    def forward(self, x):
        h = self.emb(x)
        return self.t(h), self.r(h.mean(1))

    def losses(self, b):
        y = b["labels"]
        t, r = self(y.clamp(min=0))
        return {"t": F.cross_entropy(t[:, :-1].flatten(0, 1), y[:, 1:].flatten()), "r": F.cross_entropy(r, b["c"])}
