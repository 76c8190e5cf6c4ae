"""The engine of the pages against torch: the same text, interpreted there and executed by Python here."""

import random
from itertools import product

import pytest
import torch

from tests.app.lessons.torch_twin import Setting, run

CALL = """setting => {
  const found = engine.run(setting), last = found.updates.at(-1);
  return { weights: found.weights, error: found.error?.kind ?? null, worst: found.worst, off: found.off, rate: found.rate,
    counts: [...found.counts], epochs: found.epochs, grad: found.grad, updates: found.updates.length, text: found.text,
    errors: found.updates.map(update => update.error) };
}"""

SMALL = {"rows": 200, "micro": 8, "every": 4, "epochs": 2}
BREAKS = ["tail", "undivided", "full", "leak", "early", "never", "every"]
SETTINGS = [
    *(
        {"model": m, "optimizer": o, "breaks": b}
        for m, o, b in product(("linear", "net"), ("sgd", "momentum", "adam"), ([], *([each] for each in BREAKS)))
    ),
    *({"model": "norm", "optimizer": o, "breaks": b} for o in ("sgd", "momentum") for b in ([], ["early"])),
    *({"model": "linear", "task": t, "breaks": b} for t in ("tokens", "classes") for b in ([], ["tail"], ["full"], ["never"])),
    *({"model": m, "clip": 0.2, "breaks": b} for m in ("linear", "net") for b in ([], ["clipeach"], ["tail", "clipeach"])),
    *({"model": m, "schedule": True, "breaks": b} for m in ("linear", "net") for b in ([], ["schedeach"])),
    *({"model": m, "bf16": True, "breaks": b} for m in ("linear", "net") for b in ([], ["never"])),
]  # fmt: skip
LARGE = [{"rows": 1000, "micro": 16, "every": 4, "epochs": 3, "model": m} for m in ("linear", "net", "norm")]
CHAOTIC = [{**SMALL, "model": "norm", "optimizer": "adam"}]
"""BatchNorm under Adam: a rounding error in a gradient that is nearly nothing becomes a whole step."""


def compared(engine, given):
    found = engine.evaluate(CALL, given)
    keys = {key: value for key, value in given.items() if key not in ("text", "breaks")}
    expected = run(Setting(text=found["text"], **keys))
    return found, expected


def distance(found, expected):
    weights = torch.tensor(found["weights"], dtype=torch.float64)
    return float((weights - expected.weights).norm() / expected.weights.norm())


def test_there_are_at_least_sixty_settings():
    assert len(SETTINGS) + len(LARGE) >= 60


@pytest.mark.parametrize("given", [{**SMALL, **setting} for setting in SETTINGS] + LARGE, ids=str)
def test_the_engine_ends_where_torch_ends(engine, given):
    found, expected = compared(engine, given)
    assert found["error"] is None
    assert expected.error is None
    assert distance(found, expected) <= 1e-12
    assert found["updates"] == len(expected.updates)
    assert torch.allclose(torch.tensor(found["counts"], dtype=torch.float64), expected.counts, rtol=1e-12, atol=1e-12)
    errors = torch.tensor([update.error for update in expected.updates], dtype=torch.float64)
    assert torch.allclose(torch.tensor(found["errors"], dtype=torch.float64), errors, rtol=1e-9, atol=1e-9)
    for there, (loss, accuracy, seventh) in zip(found["epochs"], expected.epochs, strict=True):
        assert there["loss"] == pytest.approx(loss, rel=1e-12)
        assert there["accuracy"] == pytest.approx(accuracy, abs=1e-12)
        assert there["seventh"] == pytest.approx(seventh, rel=1e-11)


@pytest.mark.parametrize("given", CHAOTIC, ids=str)
def test_chaotic_settings_agree_less_and_are_named(engine, given):
    found, expected = compared(engine, given)
    assert found["error"] is None
    assert distance(found, expected) <= 1e-6


FLIPS = {
    "the derivative of the loss": ("- (1 - batch.y[i])) * weight", "+ (1 - batch.y[i])) * weight"),
    "the step": ("p.data[k] -= lr * p.grad[k]", "p.data[k] += lr * p.grad[k]"),
    "the tanh": ("(1 - kept[k] * kept[k])", "(1 + kept[k] * kept[k])"),
    "the sum": ("=> old + added[k];", "=> old - added[k];"),
}


@pytest.mark.parametrize("where", FLIPS)
def test_a_flipped_sign_in_the_engine_is_seen(engine_page, where):
    def flip(text):
        before, after = FLIPS[where]
        assert text.count(before) == 1, before
        return text.replace(before, after)

    found, expected = compared(engine_page(flip), {**SMALL, "model": "net"})
    assert found["error"] is None
    assert distance(found, expected) > 1e-3


LINES = """optimizer.zero_grad()
for epoch in range(epochs):
for i, (x, y) in enumerate(loader):
outputs = model(x)
loss = criterion(outputs, y)
loss = criterion(model(x), y)
(loss / N).backward()
loss.backward()
if (i + 1) % N == 0:
if (i + 1) % N == 0 or i + 1 == len(loader):
clip_grad_norm_(model.parameters(), max_norm)
optimizer.step()
scheduler.step()
optimizer.zero_grad()""".splitlines()


def arrangement(number):
    """Half of them any order at any indentation; half near to a loop that runs, with lines swapped, lost or moved."""
    draw = random.Random(number)
    if number % 2:
        lines = draw.choices(LINES, k=draw.randint(3, 9))
        depth, text = 0, []
        for line in lines:
            text.append("    " * depth + line)
            follows = [depth + 1] * 9 if line.endswith(":") else [depth] * 8 + list(range(depth))
            depth = draw.choice([*follows, depth, max(0, depth - 1)])
        return "\n".join(text)
    text = """optimizer.zero_grad()
for epoch in range(epochs):
    for i, (x, y) in enumerate(loader):
        outputs = model(x)
        loss = criterion(outputs, y)
        (loss / N).backward()
        if (i + 1) % N == 0:
            optimizer.step()
            optimizer.zero_grad()""".splitlines()
    for _ in range(draw.randint(1, 3)):
        at, to = draw.randrange(len(text)), draw.randrange(len(text))
        kind = draw.choice(["swap", "lose", "double", "double", "dedent", "trade"])
        if kind == "swap":
            text[at], text[to] = text[to], text[at]
        elif kind == "trade":  # the words move, the indentation stays
            one, other = text[at], text[to]
            text[at] = " " * (len(one) - len(one.lstrip())) + other.lstrip()
            text[to] = " " * (len(other) - len(other.lstrip())) + one.lstrip()
        elif kind == "lose" and len(text) > 3:
            text.pop(at)
        elif kind == "double":
            text.insert(at, text[at])
        else:
            text[at] = text[at].removeprefix("    ")
    return "\n".join(text)


@pytest.mark.parametrize("part", range(10))
def test_random_arrangements_of_lines_end_as_in_torch(engine, part):
    ends = []
    for number in range(20 * part, 20 * part + 20):
        given = {"rows": 40, "micro": 8, "every": 2, "epochs": 2, "model": ("linear", "net")[number // 2 % 2]}
        given["text"] = arrangement(number)
        found, expected = compared(engine, given)
        assert found["error"] == expected.error, given["text"]
        assert distance(found, expected) <= 1e-12, given["text"]
        grad = torch.tensor(found["grad"], dtype=torch.float64)
        assert torch.allclose(grad, expected.grad, rtol=1e-9, atol=1e-12), given["text"]
        ends.append(found["error"])
    assert len(set(ends)) >= 2


def test_every_kind_of_end_is_among_the_arrangements(engine):
    small = {"rows": 40, "micro": 8, "every": 2, "epochs": 1, "model": "net"}
    ends = {engine.evaluate(CALL, {**small, "text": arrangement(number)})["error"] for number in range(200)}
    assert ends == {None, "NameError", "IndentationError", "RuntimeError"}
