"""Hints from the source alone, before a run. Half of what a run finds, and sometimes wrong: every one is a note."""

import ast
from collections.abc import Iterator

from anybatch.doctor.finding import Finding
from anybatch.doctor.fixes import fix_for


def hints(source: str, file: str) -> tuple[Finding, ...]:
    """What the loops of a script look like; nothing where it cannot be read as Python.

    >>> loop = "for i, b in enumerate(l):\\n  loss(b).backward()\\n  if i % n == 0:\\n    o.step()\\n    o.zero_grad()"
    >>> [(hint.kind, hint.line) for hint in hints(loop, "a.py")]
    [('not-divided', 2), ('off-by-one', 3)]
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    inner = [loop for loop in loops if not any(other is not loop and other in list(ast.walk(loop)) for other in loops)]
    found = [hint for loop in inner for hint in _of_loop(loop, file)]
    return tuple(dict.fromkeys(found)) if not found else tuple(found)


def _of_loop(loop: ast.For | ast.While, file: str) -> Iterator[Finding]:
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    backward = [call for call in calls if _name(call) == "backward"]
    tests = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.If) and _has(node, "step") and _modulo(node.test) is not None
    ]
    if not backward or not tests:
        return
    inside = {id(node) for test in tests for node in ast.walk(test)}
    if not any(
        isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult)
        for node in ast.walk(loop)
    ):
        yield _hint(
            "not-divided", backward[0].lineno, file, "No loss is divided in a loop that steps every so many passes."
        )
    for test in tests:
        modulo = _modulo(test.test)
        if (
            modulo is not None
            and isinstance(modulo.left, ast.Name)
            and _is_zero_test(test.test)
            and isinstance(loop, ast.For)
        ):
            yield _hint(
                "off-by-one",
                test.lineno,
                file,
                f"`{ast.unparse(test.test)}` is true at the very first pass if it counts from 0.",
            )
    for call in calls:
        if id(call) not in inside and _name(call) == "zero_grad":
            yield _hint(
                "cleared-before-use",
                call.lineno,
                file,
                "Gradients are cleared in every pass, and stepped on every so many.",
            )
        if id(call) not in inside and _name(call) in ("clip_grad_norm_", "clip_grad_value_"):
            yield _hint(
                "clip-early", call.lineno, file, "Gradients are clipped in every pass, and stepped on every so many."
            )
        if id(call) not in inside and _name(call) == "step" and "sched" in ast.unparse(call.func).lower():
            yield _hint("schedule-per-micro-batch", call.lineno, file, "The schedule is stepped in every pass.")


def _hint(kind: str, line: int, file: str, message: str) -> Finding:
    return Finding(kind=kind, severity="note", file=file, line=line, message=f"Perhaps: {message}", fix=fix_for(kind))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _has(node: ast.AST, name: str) -> bool:
    return any(isinstance(inner, ast.Call) and _name(inner) == name for inner in ast.walk(node))


def _modulo(test: ast.expr) -> ast.BinOp | None:
    return next((node for node in ast.walk(test) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)), None)


def _is_zero_test(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == 0
    )
