"""What setups are made of, and an independent check of each in float64 (own code: nothing of anybatch computes in it)."""
import dataclasses, importlib.util, pathlib, sys
from typing import Any, Callable
import torch
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
    loss: Callable | None = None          # plain (model, batch) -> scalar: for the independent check
    units: Callable | None = None         # as the objective is told (None: rows)
    reduction: str = "mean"
    micro_batch: Any = 3
    options: dict = dataclasses.field(default_factory=dict)
    quiet: bool = False                   # check with dropout and noise off: rows draw alike
    how: str = "rows"                     # rows | coupled | terms | bn | none
    terms: tuple | None = None            # (units by name, weights by name) for how="terms"
    coupled: tuple | None = None          # (encode, loss): the check of a Coupled, and what a fix by Coupled means here
    cut: Callable | None = None           # own cut for the check: batch -> list of parts
    extra: tuple = ()                     # parameters outside the model
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
    return S(model, Coupled(encode, loss), batch, coupled=(encode, loss), how="coupled", **kw)


# ---- the independent check
def rows_of(batch):
    if torch.is_tensor(batch):
        return len(batch) if batch.dim() else None
    if isinstance(batch, str):
        return None
    if dataclasses.is_dataclass(batch):
        batch = vars(batch)
    if hasattr(batch, "items"):
        batch = tuple(dict(batch).values())
    if isinstance(batch, (list, tuple)):
        if isinstance(batch, list) and batch and not any(map(torch.is_tensor, batch)):
            return len(batch)
        for b in batch:
            n = rows_of(b)
            if n is not None:
                return n
    return None


def take(batch, a, b):
    if torch.is_tensor(batch):
        return batch[a:b].clone() if batch.dim() else batch
    if dataclasses.is_dataclass(batch):
        return type(batch)(**{k: take(v, a, b) for k, v in vars(batch).items()})
    if hasattr(batch, "items"):
        return {k: take(v, a, b) for k, v in batch.items()}
    if isinstance(batch, tuple):
        parts = [take(v, a, b) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return batch[a:b] if not any(map(torch.is_tensor, batch)) else [take(v, a, b) for v in batch]
    return batch


def double(x):
    if torch.is_tensor(x):
        return x.double() if x.is_floating_point() else x
    if dataclasses.is_dataclass(x):
        return type(x)(**{k: double(v) for k, v in vars(x).items()})
    if hasattr(x, "items"):
        return {k: double(v) for k, v in x.items()}
    if isinstance(x, tuple):
        parts = [double(v) for v in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if isinstance(x, list):
        return [double(v) for v in x]
    return x


def fresh(entry):
    """The setup anew, in float64, with every generator at its seed."""
    import random
    import numpy
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0); random.seed(0); numpy.random.seed(0)
        s = entry.build()
        s.model.double()
        s.batch = double(s.batch)
    finally:
        torch.set_default_dtype(torch.float32)
    if s.quiet:
        for m in s.model.modules():
            for a in ("p", "dropout", "attention_dropout", "dropout_p", "noise", "hidden_dropout", "embd_pdrop"):
                if isinstance(getattr(m, a, None), float):
                    setattr(m, a, 0.0)
    if s.how == "bn":
        for m in s.model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.eval()
    torch.manual_seed(1); random.seed(1); numpy.random.seed(1)
    return s


def grads(s):
    ps = [p for p in list(s.model.parameters()) + list(s.extra) if p.requires_grad]
    return torch.cat([(p.grad.to_dense() if p.grad is not None else torch.zeros_like(p)).flatten() for p in ps]) if ps else torch.zeros(1)


def cuts(n):
    if n == 1:
        return [[1]]
    out = [[1, n - 1], [n - 1, 1], [n - n // 2, n // 2]]
    if n >= 4:
        out += [[n // 3, 1, n - n // 3 - 1], [3] * (n // 3) + ([n % 3] if n % 3 else [])]
    if n >= 3:
        out += [[2] * (n // 2) + ([1] if n % 2 else [])]
    return out


def scalar(r):
    return r[0] if isinstance(r, tuple) else r


def check(entry):
    """The largest relative error of accumulated gradients against the whole batch's, in float64, over uneven cuts."""
    torch.set_default_dtype(torch.float64)
    try:
        return _check(entry)
    finally:
        torch.set_default_dtype(torch.float32)


def _check(entry):
    s = fresh(entry)
    torch.set_default_dtype(torch.float64)
    if s.how == "none":
        return None
    n = rows_of(s.batch)
    if s.how == "coupled":
        encode, loss = s.coupled
        scalar(loss(encode(s.model, s.batch))).backward()
    elif s.how == "terms":
        weights = s.terms[1] or {}
        sum(weights.get(k, 1.0) * v for k, v in s.loss(s.model, s.batch).items()).backward()
    else:
        scalar(s.loss(s.model, s.batch)).backward()
    whole = grads(s)
    worst = 0.0
    plans = cuts(n) if s.cut is None else [None]
    for sizes in plans:
      try:
        t = fresh(entry)
        torch.set_default_dtype(torch.float64)
        if sizes is None:
            parts = t.cut(t.batch)
        else:
            parts, a = [], 0
            for k in sizes:
                parts.append(take(t.batch, a, a + k)); a += k
        if s.how == "coupled":
            encode, loss = t.coupled
            reps = [encode(t.model, p) for p in parts]
            scalar(loss(join(reps))).backward()
        elif s.how == "terms":
            units, weights = t.terms
            for p in parts:
                for k, v in t.loss(t.model, p).items():
                    w = (weights or {}).get(k, 1.0)
                    if units[k] is None:
                        share = 1 / len(parts)
                    else:
                        share = float(units[k](p)) / sum(float(units[k](q)) for q in parts)
                    if share:
                        (v * w * share).backward(retain_graph=True)
        else:
            if t.reduction == "sum":
                shares = [1.0] * len(parts)
            else:
                u = [float(t.units(p)) if t.units else float(rows_of(p)) for p in parts]
                shares = [x / sum(u) for x in u]
            for p, share in zip(parts, shares):
                if share:
                    (scalar(t.loss(t.model, p)) * share).backward()
        got = grads(t)
        scale = max(float(whole.norm()), 1e-3)
        worst = max(worst, float((got - whole).norm()) / scale)
        if not torch.isfinite(got).all():
            worst = float("inf")
      except Exception:
        if entry.verdict == "sound":
            raise
        if sizes is plans[-1] and not worst:  # no cut ran
            raise
    return worst


def join(reps):
    first = reps[0]
    if torch.is_tensor(first):
        return torch.cat(reps) if first.dim() else first
    if isinstance(first, dict):
        return {k: join([r[k] for r in reps]) for k in first}
    return tuple(join([r[i] for r in reps]) for i in range(len(first)))
