"""Every error that a guide quotes under "If it goes wrong" is provoked here, and reads as quoted."""

import glob
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from anybatch import (
    Coupled,
    Fit,
    Objective,
    Rows,
    Tokens,
    Update,
    clip_loss,
    info_nce,
    num_rows,
    resume,
    row_dropout,
    save,
    supervised,
    verify,
)
from anybatch.app.cli.main import run
from tests.processes.ranks import on_ranks

DOCS = Path(__file__).parent.parent / "docs"
QUOTE = re.compile(r"(?:\w+(?:Error|Warning)|anybatch): [^`]+")
ELSEWHERE = {"huggingface.md", "lightning.md", "accelerate.md"}
"""Their errors need frameworks, and are provoked in tests/integrations."""
NOT_OURS = ("RuntimeError: Expected all tensors", "ValueError: Default process group")
"""Errors of torch."""

torch.manual_seed(0)
X, Y = torch.randn(64, 10), torch.randint(0, 2, (64,))
CRITERION = supervised(nn.CrossEntropyLoss())
MASK = (torch.arange(20) < torch.arange(5, 21)[:, None]).long()
TEXT = {"input_ids": torch.ones(16, 20).long(), "attention_mask": MASK}
PAIRS = X, X + 0.1 * torch.randn(64, 10)


def made(model: nn.Module | None = None, objective: Objective | Coupled = CRITERION, **options) -> Update:
    torch.manual_seed(0)
    model = nn.Linear(10, 2) if model is None else model
    return Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), objective, **{"micro_batch": 16, "check": "off"} | options
    )


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def double(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def hooked() -> nn.Module:
    model = nn.Linear(10, 2)
    model.weight.register_hook(double)
    return model


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = normed()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Branch(nn.Module):
    """A BatchNorm that micro-batches meet or not, by their first number."""

    def __init__(self):
        super().__init__()
        self.a = nn.BatchNorm1d(10)
        self.b = nn.Linear(10, 2)

    def forward(self, x):
        return self.b(x if x[0, 0] == 0 else self.a(x))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(10, 2)
        self.b = nn.Linear(10, 2)

    def forward(self, x):
        return self.a(x)


class OutOfMemory(nn.Linear):
    def __init__(self, most: int):
        super().__init__(10, 2)
        self.most = most

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(x)


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(10, 2)
        self.lock = threading.Lock()


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 2)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return F.dropout(self.drop(self.linear(x)), 0.1, self.training)


def wide() -> Update:
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return Update(model, torch.optim.AdamW(model.parameters()), CRITERION, micro_batch=Fit("1MiB"))


def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def contrastive(model, pair):
    return info_nce()((model(pair[0]), model(pair[1])))


def encode(model, pair):
    return model(pair[0]), model(pair[1])


def overwriting(model, pair):
    return model(pair[0].mul_(2)), model(pair[1])


def saved(folder: str, **options) -> Update:
    update = made()
    update((X, Y))
    save(folder, update, number=1, **options)
    return update


def damaged(folder: str) -> None:
    update = saved(folder)
    for file in glob.glob(f"{folder}/*/*.distcp"):
        Path(file).write_bytes(Path(file).read_bytes()[:10])
    resume(folder, update)


def resumed_with_another_model(folder: str) -> None:
    saved(folder)
    resume(folder, made(nn.Linear(12, 2)))


NAN = (X * float("nan"), Y)
FIRST_BATCH: list[Callable] = [
    lambda _: made(objective=Objective(lambda model, batch: mean(model, batch).exp()), check="first")((X, Y))
]
NOT_FINITE = [lambda _: made()(NAN)]
PROVOKED: dict[str, list[Callable[[str], object]]] = {
    "index.md": [
        lambda _: Update(nn.Linear(10, 2), None, CRITERION),
        lambda _: made()({"x": X, "y": Y}),
        lambda _: Update(
            nn.Linear(10, 2), torch.optim.SGD(nn.Linear(10, 2).parameters(), lr=0.1), CRITERION, micro_batch=16
        ),
    ],
    "loop.md": [*NOT_FINITE, lambda _: made(hooked())((X, Y)), *FIRST_BATCH],
    "memory.md": [
        lambda _: wide()((torch.randn(512, 64), torch.randint(0, 10, (512,)))),
        lambda _: made(OutOfMemory(0), micro_batch=4)((X, Y)),
        lambda _: made(OutOfMemory(8))((X, Y)),
    ],
    "devices.md": [lambda _: made(OutOfMemory(8))((X, Y))],
    "ragged.md": [
        lambda _: Tokens(8).cut({name: tensor.flip(0) for name, tensor in TEXT.items()}),
        lambda _: Tokens(64).cut(TEXT | {"features": torch.randn(16, 20)}),
        *FIRST_BATCH,
    ],
    "contrastive.md": [
        lambda _: made(nn.Linear(10, 4), Objective(contrastive), check="first")(PAIRS),
        lambda _: made(nn.Linear(10, 4), Coupled(encode, clip_loss()))(PAIRS),
        lambda _: made(nn.Linear(10, 4), Coupled(overwriting, info_nce()))((X.clone(), X + 0.1)),
    ],
    "batchnorm.md": [
        lambda _: made(normed())((X, Y)),
        lambda _: made(Checkpointed(), batch_norm="exact")((X, Y)),
        lambda _: made(torch.compile(normed(), backend="eager"), batch_norm="exact")((X, Y)),
        lambda _: made(Branch(), batch_norm="exact")((torch.cat([torch.zeros(16, 10), X[16:]]), Y)),
    ],
    "precision.md": [lambda _: made(autocast="bf16"), *NOT_FINITE],
    "resume.md": [resumed_with_another_model, damaged, lambda folder: saved(folder, loader=DataLoader([1, 2]))],
    "verify.md": [
        lambda _: verify(nn.Linear(10, 2), CRITERION, (X[:1], Y[:1])),
        lambda _: verify(Locked(), CRITERION, (X, Y)),
        lambda _: verify(hooked(), CRITERION, (X, Y)),
    ],
    "objectives.md": [
        *FIRST_BATCH,
        lambda _: supervised(lambda outputs, targets: F.cross_entropy(outputs, targets)),
        lambda _: made(objective=Objective(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")))((X, Y)),
        lambda _: made(objective=Objective(lambda model, batch: 0.5))((X, Y)),
    ],
    "logging.md": [
        lambda _: made(on_update="tensorboard"),
        lambda _: made(objective=Objective(lambda model, batch: (mean(model, batch), {"each": batch[0][:, 0]})))(
            (X, Y)
        ),
    ],
    "loaders.md": [
        lambda _: num_rows([torch.zeros(5) for _ in range(3)]),
        lambda _: num_rows((torch.zeros(3), torch.zeros(4))),
        lambda _: Rows(4, groups=2).cut(torch.arange(7)),
    ],
    "dropout.md": [
        lambda _: row_dropout(nn.LSTM(4, 4, 2, dropout=0.1)),
        lambda _: made(row_dropout(Dropped()))((X, Y)),
    ],
    "noise.md": [lambda _: made(noise=0)],
}
TYPED: dict[str, list[list[str]]] = {
    "doctor.md": [["doctor", "train.py"], ["doctor", "nosuch.py"]],
    "train.md": [["train", "nosuch"], ["train", "my_task.py"], ["train", "--resume", "nope"]],
    "report.md": [["report", "nope"]],
    "learn.md": [["learn", "nosuch"]],
}
"""Commands that fail, in a folder with an empty train.py and my_task.py."""


def quotes_of(page: str) -> list[str]:
    """Return the errors that a page quotes: as far as they are quoted, and without the folder of a checkpoint."""
    text = (DOCS / page).read_text().partition("## If it goes wrong")[2]
    quotes = [quote for quote in re.findall(r"`([^`]+)`", text) if QUOTE.fullmatch(quote)]
    return [quote for quote in quotes if not quote.startswith(NOT_OURS)]


def message_of(action: Callable[[str], object], folder: str) -> str:
    """Return the error, or else the warning, as Python prints it."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            action(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace(folder, "...")
    return f"{warned[0].category.__name__}: {warned[0].message}"


def check_quotes(page: str, messages: list[str]) -> None:
    """Each quote is the beginning of a message, and each message is quoted."""
    quotes = [quote.removesuffix("...").rstrip() for quote in quotes_of(page)]
    assert quotes
    assert [quote for quote in quotes if not any(message.startswith(quote) for message in messages)] == []
    assert [message for message in messages if not any(message.startswith(quote) for quote in quotes)] == []


@pytest.mark.parametrize("page", PROVOKED)
def test_the_errors_of_a_guide_read_as_quoted(page, tmp_path):
    folders = [tmp_path / str(number) for number in range(len(PROVOKED[page]))]
    check_quotes(
        page, [message_of(action, str(folder)) for action, folder in zip(PROVOKED[page], folders, strict=True)]
    )


@pytest.mark.parametrize("page", TYPED)
def test_the_errors_of_a_command_read_as_quoted(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "my_task.py"):
        Path(name).write_text("pass\n")
    messages = []
    for arguments in TYPED[page]:
        assert run(arguments) == 2
        messages += [line for line in capfd.readouterr().err.splitlines() if "anybatch: " in line]
    check_quotes(page, [message[message.index("anybatch: ") :].replace(str(tmp_path), "...") for message in messages])


def errors_on_a_rank() -> list[str]:
    from torch.distributed.fsdp import fully_shard

    inner = nn.Linear(10, 2)
    low = nn.Linear(10, 2).to(torch.bfloat16)
    fully_shard(low)
    calls_the_inner = Objective(lambda model, batch: mean(inner, batch))
    actions: list[Callable] = [
        lambda _: made(DistributedDataParallel(inner), calls_the_inner)((X, Y)),
        lambda _: made(DistributedDataParallel(Branches()))((X, Y)),
        lambda _: made(low)((X.bfloat16(), Y)),
    ]
    return [message_of(action, "nowhere") for action in actions]


def test_the_errors_of_ranks_read_as_quoted():
    for messages in on_ranks(2, errors_on_a_rank):
        check_quotes("ranks.md", messages)


def test_every_guide_that_quotes_errors_is_checked():
    checked = {*PROVOKED, *TYPED, "ranks.md", *ELSEWHERE}
    assert {path.name for path in DOCS.glob("*.md") if quotes_of(path.name)} == checked
