"""Batches that were once cut wrongly without a word: now exact against the whole batch in float64, or an error by name.

Each has a twin: the cut as it was, made by hand, is far off.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from anybatch import (
    Accumulator,
    BatchError,
    Cost,
    Coupled,
    LossError,
    MemoryLimitError,
    MicroBatches,
    Objective,
    PerRow,
    Rows,
    SampleList,
    SplitError,
    Stacked,
    Tokens,
    Update,
    verify,
    windows,
)
from tests.reference import gradient, relative_error
from tests.setups import seeded

EXACT, WRONG = 1e-12, 0.05
FINE = Cost(fixed=0.0)


_seeded = seeded(0)


def whole_gradient(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Tensor:
    """The gradient of the whole batch at once, on a copy."""
    twin = copy.deepcopy(model)
    returned = loss(twin, batch)
    (returned[0] if isinstance(returned, tuple) else returned).backward()
    return gradient(twin.parameters())


def off(model: nn.Module, objective: Objective | Coupled, batch: Any, split: Any, **options: Any) -> float:
    """How far the accumulated gradient is from that of the whole batch."""
    whole = objective.whole()
    reference = whole_gradient(model, whole.loss, batch.batch if hasattr(batch, "batch") else batch)
    Accumulator(model, objective, micro_batch=split, **options).backward(batch)
    return relative_error(model, reference)


def by_hand(model: nn.Module, objective: Objective, batch: Any, parts: list[Any], shares: list[float]) -> float:
    """How far a cut of one's own is."""
    reference = whole_gradient(model, objective.loss, batch)
    for part, share in zip(parts, shares, strict=True):
        (objective.loss(model, part) * share).backward()
    return relative_error(model, reference)


class Reader(nn.Module):
    """Embeds tokens and mixes those of a row: what a row is makes a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 6), nn.GRU(6, 6, batch_first=True)
        self.double()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        states = self.mix(self.embed(ids))[0]
        if mask is None:
            return states[:, -1]
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def of_samples(model: nn.Module, samples: list[Tensor]) -> Tensor:
    """Collates inside: the mean over samples."""
    ids = pad_sequence(list(samples), batch_first=True, padding_value=0)
    return model(ids).square().mean()


PACKED = Objective(of_samples)


def test_packed_samples_collated_inside_the_objective_are_refused_or_exact_once_told():
    samples = [torch.randint(1, 20, (12,)) for _ in range(8)]
    with pytest.raises(BatchError, match=r"8 samples, one per row; or 8 columns of 12 rows each"):
        Accumulator(Reader(), PACKED, micro_batch=3).backward(samples)
    assert off(Reader(), PACKED, SampleList(samples), 3) < EXACT
    assert off(Reader(), PACKED, samples, Rows(3, collate=list)) < EXACT


def test_cut_along_their_tokens_they_are_not():
    samples = [torch.randint(1, 20, (12,)) for _ in range(8)]
    parts = [[sample[start : start + 3] for sample in samples] for start in range(0, 12, 3)]
    assert by_hand(Reader(), PACKED, samples, parts, [1 / 4] * 4) > WRONG


def test_ragged_samples_are_rows_and_so_is_the_pair_that_happens_to_be_equally_long():
    model = Reader()
    each = Objective(
        lambda model, samples: sum(model(sample[None]).square().mean() for sample in samples) / len(samples)
    )
    accumulator = Accumulator(model, each, micro_batch=1)
    for lengths in ((3, 5, 4, 2), (6, 6)):
        samples = [torch.randint(1, 20, (length,)) for length in lengths]
        model.zero_grad()
        reference = whole_gradient(model, each.loss, samples)
        assert accumulator.backward(SampleList(samples)).micro_batches == len(lengths)
        assert relative_error(model, reference) < EXACT


def test_ragged_samples_that_are_not_marked_are_refused_before_a_pair_can_be_misread():
    samples = [torch.randint(1, 20, (length,)) for length in (3, 5, 4, 2)]
    with pytest.raises(BatchError, match=r"4 samples, one per row; or 4 columns that disagree.*SampleList"):
        Accumulator(Reader(), PACKED, micro_batch=1).backward(samples)


def test_pairs_of_image_and_label_are_cut_by_pairs():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5)).double()
    samples = [(torch.randn(3, 4, 4, dtype=torch.float64), row % 5) for row in range(64)]
    seen: list[int] = []

    def loss(model: nn.Module, pairs: list[tuple[Tensor, int]]) -> Tensor:
        seen.append(len(pairs))
        images, labels = zip(*pairs, strict=True)
        return F.cross_entropy(model(torch.stack(images)), torch.tensor(labels))

    assert off(model, Objective(loss), samples, 16) < EXACT
    assert seen == [64, 16, 16, 16, 16], "the whole for the reference, then micro-batches"


class Recurrent(nn.Module):
    """Time first, as torch's recurrent layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5), nn.Linear(5, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])[..., 0]


TIME_FIRST = Objective(lambda model, pair: F.mse_loss(model(pair[0]), pair[1]))


def sequences(time: int = 9, rows: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(time, rows, 3, dtype=torch.float64), torch.randn(time, rows, dtype=torch.float64)


def test_time_first_batches_are_refused_until_the_rows_are_named_and_then_exact():
    with pytest.raises(BatchError, match=r"lstm \(LSTM\) takes time first.*9 entries in dim 0 and 10 in dim 1"):
        Accumulator(Recurrent(), TIME_FIRST, micro_batch=4).backward(sequences())
    assert off(Recurrent(), TIME_FIRST, sequences(), Rows(4, batch_dim=1)) < EXACT


def test_cut_along_time_they_are_not():
    assert off(Recurrent(), TIME_FIRST, sequences(), Rows(4, batch_dim=0)) > WRONG


def preference(model: nn.Module, rows: Tensor) -> Tensor:
    """Of [chosen; rejected]: the mean over pairs."""
    chosen, rejected = model(rows)[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def views(model: nn.Module, rows: Tensor) -> Tensor:
    """Of interleaved views: how far the two of each row are apart."""
    first, second = model(rows)[::2], model(rows)[1::2]
    return (first * second).sum(1).exp().mean()


PAIRED = [
    pytest.param(preference, Stacked(2), id="chosen; rejected"),
    pytest.param(preference, lambda rows: torch.arange(len(rows)) % (len(rows) // 2), id="by function"),
    pytest.param(views, 2, id="interleaved"),
]


def scorer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


@pytest.mark.parametrize(("loss", "groups"), PAIRED)
@pytest.mark.parametrize("size", [2, 5, 6, 7])
def test_rows_that_belong_together_are_not_torn_apart(loss, groups, size):
    rows = torch.randn(20, 4, dtype=torch.float64)
    assert off(scorer(), Objective(loss), rows, Rows(size, groups=groups)) < EXACT


@pytest.mark.parametrize(("loss", "groups"), PAIRED[:1])
def test_torn_apart_they_are_wrong(loss, groups):
    rows = torch.randn(20, 4, dtype=torch.float64)
    assert off(scorer(), Objective(loss), rows, Rows(4)) > WRONG


class Full(nn.Module):
    """Runs out of memory above some number of rows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.inner, self.most = scorer(), most

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) > self.most and torch.is_grad_enabled() and not getattr(self, "is_free", False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.inner(rows)


@pytest.mark.parametrize(("loss", "groups"), PAIRED)
def test_after_an_out_of_memory_groups_are_made_fewer_and_not_torn(loss, groups):
    rows, model = torch.randn(20, 4, dtype=torch.float64), Full(7)
    free = copy.deepcopy(model)
    free.is_free = True
    reference = whole_gradient(free, loss, rows)
    result = Accumulator(model, Objective(loss), micro_batch=Rows(16, groups=groups)).backward(rows)
    assert result.retries > 0
    assert relative_error(model, reference) < EXACT


def test_where_one_group_does_not_fit_shrinking_is_refused():
    rows = torch.randn(20, 4, dtype=torch.float64)
    accumulator = Accumulator(Full(1), Objective(preference), micro_batch=Rows(8, groups=Stacked(2)))
    with pytest.raises(
        MemoryLimitError, match=r"in micro-batches of 2 rows that belong together \(groups=\), which are never"
    ):
        accumulator.backward(rows)


def test_micro_batches_that_must_stay_whole_are_not_cut_after_an_out_of_memory():
    rows = torch.randn(24, 4, dtype=torch.float64)
    batch = next(iter(windows(rows.split(12), 2, whole=True)))
    with pytest.raises(MemoryLimitError, match=r"in micro-batches that must stay whole"):
        Accumulator(Full(7), Objective(preference), micro_batch=4).backward(batch)
    others = MicroBatches(rows.split(12))
    assert Accumulator(Full(7), Objective(preference), micro_batch=4).backward(others).retries == 1


def test_whole_ones_stay_whole_after_others_were_cut():
    parts, model = torch.randn(24, 4, dtype=torch.float64).split(12), Full(7)
    accumulator = Accumulator(model, Objective(preference), micro_batch=4)
    assert accumulator.backward(MicroBatches(parts)).retries == 1
    model.most = 12
    assert accumulator.backward(MicroBatches(parts, whole=True)).micro_batches == 2
    assert accumulator.backward(MicroBatches(parts)).micro_batches == 4


def ragged(rows: int = 16, width: int = 9) -> dict[str, Tensor]:
    """Rows whose lengths jump, so that no sort by length leaves them where they are."""
    lengths = torch.tensor([1 + (5 * row) % width for row in range(rows)])
    lengths[0] = width
    mask = (torch.arange(width) < lengths[:, None]).double()
    return {"input_ids": torch.randint(1, 20, (rows, width)) * mask.long(), "attention_mask": mask}


def read(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["input_ids"], batch["attention_mask"])


def listwise(states: Tensor) -> Tensor:
    """Rows are lists of four answers; the first of each is to score best."""
    return F.cross_entropy(states[:, 0].reshape(-1, 4), torch.zeros(len(states) // 4, dtype=torch.long))


def simclr(states: Tensor) -> Tensor:
    """Interleaved views: each row's positive is its neighbour."""
    states = F.normalize(states, dim=1)
    scores = (states @ states.T / 0.1).fill_diagonal_(-torch.inf)
    return F.cross_entropy(scores, torch.arange(len(states)) ^ 1)


@pytest.mark.parametrize("loss", [listwise, simclr])
def test_a_coupled_loss_sees_the_batchs_own_order_whatever_tokens_sorted(loss):
    model, batch = Reader(), ragged()
    assert Tokens(24, cost=FINE).cut(batch).row_numbers[0] != (0, 1)
    assert off(model, Coupled(read, loss), batch, Tokens(24, cost=FINE)) < EXACT


@pytest.mark.parametrize("loss", [listwise, simclr])
def test_in_the_order_of_the_cut_it_is_wrong(loss):
    model, batch = Reader(), ragged()
    order = [row for rows in Tokens(24, cost=FINE).cut(batch).row_numbers for row in rows]
    reference = whole_gradient(model, lambda model, batch: loss(read(model, batch)), batch)
    loss(read(model, batch)[order]).backward()
    assert relative_error(model, reference) > WRONG


class Normed(Reader):
    """Its states pass a BatchNorm: all rows look at each other twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.norm(super().forward(ids, mask))


@pytest.mark.parametrize("loss", [listwise, simclr])
def test_so_it_does_in_lockstep_with_exact_batch_norm(loss):
    assert off(Normed(), Coupled(read, loss), ragged(), Tokens(24, cost=FINE), batch_norm="exact") < EXACT


@pytest.mark.parametrize("batch_norm", [None, "exact"])
def test_what_a_coupled_loss_returns_per_row_is_in_the_batchs_order(batch_norm):
    batch, model = ragged(), Normed() if batch_norm else Reader()
    batch["number"] = torch.arange(16)
    coupled = Coupled(
        lambda model, part: {
            "states": read(model, part),
            "number": part["number"],
            "name": [str(int(n)) for n in part["number"]],
        },
        lambda held: (
            simclr(held["states"]),
            {"number": PerRow(held["number"]), "first": PerRow(torch.tensor([int(name) for name in held["name"]]))},
        ),
    )
    metrics = (
        Accumulator(model, coupled, micro_batch=Tokens(24, cost=FINE), batch_norm=batch_norm).backward(batch).metrics
    )
    assert metrics["number"].tolist() == list(range(16))
    assert metrics["first"].tolist() == list(range(16))


def test_representations_whose_rows_cannot_be_told_are_refused_where_rows_were_sorted():
    coupled = Coupled(lambda model, part: read(model, part).repeat(2, 1), simclr)
    with pytest.raises(LossError, match=r"encode returned 32 entries for 16 rows, which were sorted to be cut"):
        Accumulator(Reader(), coupled, micro_batch=Tokens(24, cost=FINE)).backward(ragged())


class WithFeatures(Reader):
    """Reads features of a row beside its tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.beside = nn.Linear(width, 6).double()


FEATURES = Objective(
    lambda model, batch: (
        (read(model, batch) + model.beside(batch["features"])).square().mean()
        + (read(model, batch).sum(1, keepdim=True) - batch["classes"]).square().mean()
    )
)


def featured(rows: int = 16, width: int = 9) -> dict[str, Tensor]:
    beside = {name: torch.randn(rows, width, dtype=torch.float64) for name in ("features", "classes")}
    return ragged(rows, width) | beside


def test_features_as_wide_as_the_padding_are_refused_by_name_or_kept():
    with pytest.raises(SplitError, match=r"batch\['features'\] is 9 wide"):
        Accumulator(WithFeatures(9), FEATURES, micro_batch=Tokens(24, cost=FINE)).backward(featured())
    split = Tokens(24, cost=FINE, keep=["features", "classes"])
    assert off(WithFeatures(9), FEATURES, featured(), split) < EXACT


def test_features_that_had_another_width_than_the_padding_are_kept_when_it_meets_theirs():
    model, split = WithFeatures(9), Tokens(24, cost=FINE)
    accumulator = Accumulator(model, FEATURES, micro_batch=split)
    beside = {name: value for name, value in featured().items() if name in ("features", "classes")}
    accumulator.backward(ragged(width=7) | beside)
    model.zero_grad()
    batch = ragged() | beside
    reference = whole_gradient(model, FEATURES.loss, batch)
    accumulator.backward(batch)
    assert relative_error(model, reference) < EXACT


def test_features_that_lose_columns_are_wrong():
    batch, model = featured(), WithFeatures(9)
    reference = whole_gradient(model, FEATURES.loss, batch)
    lost = batch | {name: batch[name] * batch["attention_mask"] for name in ("features", "classes")}
    FEATURES.loss(model, lost).backward()
    assert relative_error(model, reference) > WRONG


class Dropping(Reader):
    """With stock dropout, on a machine whose passes take as long as `seconds` says."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self.drop, self.seconds, self.now = nn.Dropout(0.2), seconds, 0.0

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        self.now += self.seconds(ids.numel())
        return self.drop(super().forward(ids, mask))


def weights_after(monkeypatch, split: Tokens, seconds: Callable[[int], float]) -> Tensor:
    torch.manual_seed(1)
    model = Dropping(seconds)
    monkeypatch.setattr("anybatch.core.cutting.perf_counter", lambda: model.now)
    objective = Objective(lambda model, batch: read(model, batch).square().mean())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.5), objective, micro_batch=split)
    for _ in range(20):
        update(ragged())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


MACHINES: list[Callable[[int], float]] = [lambda tokens: 1.0, lambda tokens: tokens**2]


def test_the_same_seed_twice_is_bit_for_bit_with_stock_dropout_however_long_passes_took(monkeypatch):
    one, other = (weights_after(monkeypatch, Tokens(60), seconds) for seconds in MACHINES)
    assert torch.equal(one, other)


def test_with_learning_the_cut_follows_the_clock_and_stock_dropout_the_cut(monkeypatch):
    one, other = (weights_after(monkeypatch, Tokens(60, learn=True), seconds) for seconds in MACHINES)
    assert float((one - other).norm() / one.norm()) > 1e-4


@pytest.mark.parametrize("split", [Rows(4, groups=2), Rows(4, batch_dim=1)])
def test_groups_and_rows_of_another_dim_are_verified_and_their_self_check_says_nothing_wrong(split):
    rows, model = torch.randn(20, 8, dtype=torch.float64), nn.Linear(8, 2).double()
    wide = Objective(lambda model, rows: model(rows.T if split.batch_dim else rows).square().mean())
    batch = rows.T.contiguous() if split.batch_dim else rows
    assert verify(model, wide, batch, micro_batch=split).is_exact
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), wide, micro_batch=split, check="first")
    assert update(batch).applied
