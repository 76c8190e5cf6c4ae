"""The printed fix, applied by its words: code in it is evaluated as it stands; where it names a form (Coupled, observed, reduction, batch_norm) that
form is put in place, by hand, with the parts that the setup keeps for it. Every named cause's fix is applied, one after the other, on a fresh setup."""
import ast, random, re
import numpy
import torch, torch.nn.functional as F
from torch import nn
import anybatch


def expressions(text):
    """What follows `units=` in the fix, as far as it is Python."""
    for m in re.finditer(r"units=", text):
        rest = text[m.end():]
        for end in range(len(rest), 0, -1):
            piece = rest[:end].rstrip(" .,;`")
            try:
                if not isinstance(ast.parse(piece, mode="eval").body, (ast.Lambda, ast.Name, ast.Attribute)):
                    continue
            except SyntaxError:
                continue
            yield piece
            break


def one(s, cause):
    text = cause["fix"]
    space = {"torch": torch, "nn": nn, "F": F, **vars(anybatch), **s.names}
    for piece in expressions(text):
        try:
            units = eval(piece, space)
            if callable(units):
                s.objective = anybatch.Objective(s.loss, units=units)
            else:
                continue
            s.units, s.reduction = units, "mean"
            return f"units={piece}"
        except Exception:
            continue
    if cause["kind"] == "units" and re.search(r"units=(anybatch\.)?rows|default", text) or "leave units out" in text:
        s.objective, s.units = anybatch.Objective(s.loss), None
        return "rows"
    if s.right_units and re.search("count of", text):
        s.objective, s.units = anybatch.Objective(s.loss, units=s.right_units), s.right_units
        return "units, by hand"
    if re.search(r"[Ll]eave reduction at .mean|reduction=.mean", text) and s.loss:
        s.objective, s.reduction = anybatch.Objective(s.loss, units=s.units) if s.units else anybatch.Objective(s.loss), "mean"
        return "reduction='mean'"
    if cause["kind"] == "padding" and "Rows(n)" in text:
        s.micro_batch = 3
        return "Rows(3)"
    m = re.search(r"batch_norm=[\"'](exact|frozen)", text)
    if m:
        s.options = {**s.options, "batch_norm": m[1]}
        return m[0]
    if re.search(r"observed\(", text):
        s.objective = anybatch.observed(s.loss)
        return "observed(loss)"
    m = re.search(r"reduction=[\"'](sum|mean)", text)
    if m and s.loss:
        s.objective = anybatch.Objective(s.loss, units=s.units, reduction=m[1]) if s.units else anybatch.Objective(s.loss, reduction=m[1])
        s.reduction = m[1]
        return m[0]
    if "Coupled" in text and s.coupled:
        s.objective = anybatch.Coupled(*s.coupled)
        return "Coupled(encode, loss)"
    return None


def apply(entry, causes, run_verify):
    torch.manual_seed(0); random.seed(0); numpy.random.seed(0)
    s = entry.build()
    done = [one(s, c) for c in causes]
    if not any(done):
        return f"cannot be applied: {causes[0]['fix'][:200]}"
    torch.manual_seed(0); random.seed(0); numpy.random.seed(0)
    good, what = run_verify(s)
    return "exact" if good else f"still {what} after {done}"
