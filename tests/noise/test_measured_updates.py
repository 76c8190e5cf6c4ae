"""Updates that are measured: what they say is what the rows' gradients give, and they learn the same."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from anybatch import Auto, Coupled, MicroBatches, Objective, Rows, Tokens, Update, info_nce, resume, save, supervised
from anybatch.core import Cut, gradient_hooks_of, in_arrival_order, is_in_arrival_order, take_rows
from anybatch.errors import UpdateError
from tests.noise.problems import PROBLEMS, TOKENS, Problem
from tests.parallel.wrapped import fsdp
from tests.processes.ranks import on_ranks


def still(problem: Problem, **options: Any) -> Update:
    """An update whose weights stay where they are."""
    model = copy.deepcopy(problem.model)
    return Update(model, torch.optim.SGD(model.parameters(), lr=0.0), problem.objective, **options)


def rows_of_windows(problem: Problem, counts: list[int]) -> list[list[int]]:
    chance = torch.Generator().manual_seed(7)
    return [torch.randint(0, problem.num_rows, (count,), generator=chance).tolist() for count in counts]


def expected(problem: Problem, cuts: list[list[list[int]]]) -> float:
    """The ratio of means by the definition, pair by pair of rows: those of different micro-batches are the signal."""
    noises, signals = [], []
    for parts in cuts:
        rows = [(row, number) for number, part in enumerate(parts) for row in part]
        units = sum(float(problem.units[row]) for row, _ in rows)
        apart = [(a, b) for a, one in rows for b, other in rows if one != other]
        together = [(a, b) for a, one in rows for b, other in rows if one == other]
        signal = sum(float(problem.grams[a, b]) for a, b in apart)
        signal /= sum(float(problem.units[a] * problem.units[b]) for a, b in apart)
        noise = sum(float(problem.grams[a, b] - signal * problem.units[a] * problem.units[b]) for a, b in together)
        noises.append(len(rows) * noise / units**2)
        signals.append(signal)
    return sum(noises) / sum(signals)


def parts_of(rows: list[int], sizes: list[int]) -> list[list[int]]:
    stops = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [rows[start:stop] for start, stop in pairwise(stops)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_what_every_rows_gradient_gives_with_tails_and_unequal_cuts(name):
    problem = PROBLEMS[name]()
    update = still(problem, micro_batch=5, noise=1, clip_norm=0.01)
    windows = rows_of_windows(problem, [13, 16, 11, 13, 7, 13])
    results = [update(problem.batch(rows)) for rows in windows]
    cut = {13: [5, 4, 4], 16: [4, 4, 4, 4], 11: [4, 4, 3], 7: [4, 3]}
    wanted = expected(problem, [parts_of(rows, cut[len(rows)]) for rows in windows])
    assert results[-1].noise_scale.rows == pytest.approx(wanted, rel=1e-9)
    assert [result.noise_scale is None for result in results] == [True] * 4 + [False] * 2
    assert results[-1].noise_scale.windows == 6
    assert results[3].noise_reason == "4 of 5 windows are measured, one update in 1"
    assert results[-1].noise_reason is None


@pytest.mark.parametrize("split", [Tokens(120), Auto(most=Tokens(120))], ids=["Tokens", "Auto"])
def test_a_split_that_sorts_cuts_measured_updates_in_arrival_order(split):
    problem = PROBLEMS["text"]()
    update, sorting = still(problem, micro_batch=split, noise=1), Tokens(120)
    windows = rows_of_windows(problem, [13, 16, 11, 13, 8])
    for rows in windows:
        result = update(problem.batch(rows))
    cuts = []
    for rows in windows:
        batch = problem.batch(rows)
        cut = sorting.cut_in_arrival_order(batch, sorting.cut(batch))
        numbers = [row for part in cut.row_numbers for row in part]
        assert numbers == list(range(len(rows)))
        assert cut.cut.largest <= 120
        cuts.append([[rows[row] for row in part] for part in cut.row_numbers])
    if isinstance(split, Tokens):
        assert result.noise_scale.rows == pytest.approx(expected(problem, cuts), rel=1e-9)
    sorted_cuts = [
        [[rows[row] for row in part] for part in sorting.cut(problem.batch(rows)).row_numbers] for rows in windows
    ]
    assert result.noise_scale.rows != pytest.approx(expected(problem, sorted_cuts), rel=1e-2)


def test_rows_that_are_sorted_are_seen_where_the_first_of_each_micro_batch_are_not():
    lengths = torch.tensor([9, 2, 9, 2])
    mask = (torch.arange(9) < lengths[:, None]).long()
    batch = {"input_ids": torch.ones(4, 9).long(), "attention_mask": mask}
    rows = ((0, 2), (1, 3))
    by_length = MicroBatches([take_rows(batch, list(some)) for some in rows], Cut(rows=rows, lengths=(9, 2)))
    assert in_arrival_order(Tokens(18), batch, by_length).row_numbers == ((0, 1), (2, 3))
    assert not is_in_arrival_order(by_length)
    assert is_in_arrival_order(MicroBatches(by_length.micro_batches, by_length.cut, together=2))


def trained(micro_batch: Any, noise: int | None) -> nn.Module:
    problem = PROBLEMS["text"]()
    model = copy.deepcopy(problem.model)
    update = Update(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6),
        problem.objective,
        micro_batch=micro_batch,
        noise=noise,
    )
    for rows in rows_of_windows(problem, [13, 16, 11, 13, 8]):
        update(problem.batch(rows))
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_measuring_changes_no_bit_where_rows_are_not_sorted_and_only_rounding_where_they_are():
    assert difference(trained(Rows(4), noise=1), trained(Rows(4), noise=None)) == 0.0
    assert difference(trained(Tokens(120), noise=1), trained(Tokens(120), noise=None)) <= 1e-12


def test_hooks_are_there_in_measured_updates_alone():
    problem, seen = PROBLEMS["linear"](), []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(any(any(gradient_hooks_of(parameter)) for parameter in model.parameters()))
        return F.mse_loss(model(batch[0]), batch[1])

    model = copy.deepcopy(problem.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    update = Update(model, optimizer, Objective(loss), micro_batch=5, noise=3, check="off")
    for rows in rows_of_windows(problem, [10] * 4):
        update(problem.batch(rows))
    assert seen == [True] * 2 + [False] * 4 + [True] * 2
    assert not any(any(gradient_hooks_of(parameter)) for parameter in model.parameters())


def with_scaler(problem: Problem) -> Update:
    return still(problem, micro_batch=5, noise=1, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))


def summed(problem: Problem) -> Update:
    model = copy.deepcopy(problem.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Update(model, optimizer, supervised(nn.MSELoss(reduction="sum")), micro_batch=5, noise=1)


def dropping(problem: Problem) -> Update:
    return still(problem, micro_batch=5, noise=1, on_nonfinite="drop")


def beside_frozen(problem: Problem) -> Update:
    """A parameter that has a gradient and is not stepped has no part in the norm of the gradient."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.extra = copy.deepcopy(problem.model), nn.Parameter(torch.ones(1).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.extra

    model = Wide()
    return Update(model, torch.optim.SGD(model.inner.parameters(), lr=0.0), problem.objective, micro_batch=5, noise=1)


@pytest.mark.parametrize("make", [with_scaler, summed, dropping, beside_frozen])
def test_it_is_the_same_however_the_gradient_is_made(make):
    problem = PROBLEMS["linear"]()
    update, windows = make(problem), rows_of_windows(problem, [13] * 5)
    for rows in windows:
        batch = problem.batch(rows)
        if make is dropping:
            bad = (torch.full((5, 6), torch.nan).double(), torch.zeros(5, 1).double())
            parts = [problem.batch(part) for part in parts_of(rows, [5, 4, 4])]
            result = update(MicroBatches((parts[0], bad, *parts[1:])))
            assert result.dropped == (1,)
        else:
            result = update(batch)
    wanted = expected(problem, [parts_of(rows, [5, 4, 4]) for rows in windows])
    # a row that was dropped is still one of the batch's rows
    assert result.noise_scale.rows == pytest.approx(wanted * (18 / 13 if make is dropping else 1), rel=1e-6)


def test_an_update_that_is_not_applied_says_nothing():
    problem = PROBLEMS["linear"]()
    update = still(problem, micro_batch=5, noise=1, on_nonfinite="skip")
    for rows in rows_of_windows(problem, [13] * 5):
        update(problem.batch(rows))
    inputs, targets = problem.batch([1, 2, 3, 4, 5, 6])
    result = update((inputs * torch.nan, targets))
    assert (result.applied, result.noise_scale.windows) == (False, 5)


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def reentrant(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    first = checkpoint(model, inputs, use_reentrant=True)
    return F.mse_loss(checkpoint(model, inputs, use_reentrant=True) + first, batch[1])


REASONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "not measured": (lambda: nn.Linear(6, 1).double(), supervised(nn.MSELoss()), {"noise": None}),
    "one micro-batch": (lambda: nn.Linear(6, 1).double(), supervised(nn.MSELoss()), {"micro_batch": 64}),
    "coupled": (
        lambda: nn.Linear(6, 4).double(),
        Coupled(lambda model, batch: (model(batch[0]), model(batch[0] + 1)), info_nce()),
        {},
    ),
    "batch_norm='exact'": (norm_net, supervised(nn.MSELoss()), {"batch_norm": "exact"}),
    "reentrant": (lambda: nn.Linear(6, 1).double(), Objective(reentrant), {}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_where_there_is_none_the_reason_is_given(reason):
    make, objective, options = REASONS[reason]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    update = Update(model, optimizer, objective, **({"micro_batch": 4, "noise": 1, "check": "off"} | options))
    for _ in range(6):
        result = update((torch.randn(12, 6).double(), torch.randn(12, 1).double()))
    assert result.noise_scale is None
    assert reason in result.noise_reason


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8"])
def test_what_is_no_number_of_updates_is_refused(value):
    with pytest.raises(UpdateError, match=r"noise=.*such as 8"):
        still(PROBLEMS["linear"](), micro_batch=4, noise=value)


def test_a_resumed_run_goes_on_measuring_where_it_was(tmp_path):
    problem = PROBLEMS["linear"]()
    windows = rows_of_windows(problem, [13] * 15)
    through, first, second = (still(problem, micro_batch=5, noise=2) for _ in range(3))
    wanted = [through(problem.batch(rows)).noise_scale for rows in windows]
    for rows in windows[:7]:
        first(problem.batch(rows))
    save(tmp_path, first, number=7)
    resume(tmp_path, second)
    got = [second(problem.batch(rows)).noise_scale for rows in windows[7:]]
    assert got == wanted[7:]
    assert got[-1].windows == 8


def measured_on_ranks(model: nn.Module, batches: list[list[dict[str, Tensor]]]) -> Any:
    wrapped = DistributedDataParallel(model)
    update = Update(wrapped, torch.optim.SGD(model.parameters(), lr=0.0), TOKENS, micro_batch=3, noise=1)
    return [update(of_ranks[torch.distributed.get_rank()]) for of_ranks in batches][-1].noise_scale


@pytest.mark.parametrize("first", [2, 6])
def test_two_ranks_say_what_the_rows_of_both_give(first):
    problem = PROBLEMS["text"]()
    halves = [(rows[:first], rows[first:]) for rows in rows_of_windows(problem, [13, 9, 13, 11, 12, 13])]
    told = on_ranks(2, measured_on_ranks, problem.model, [[problem.batch(half) for half in both] for both in halves])
    cuts = [[part.tolist() for half in both for part in Rows(3).cut(torch.tensor(half))] for both in halves]
    assert told[0] == told[1]
    assert told[0].rows == pytest.approx(expected(problem, cuts), rel=1e-9)
    assert told[0].windows == 6


def sharded() -> tuple[Any, str]:
    problem = PROBLEMS["linear"]()
    model = fsdp(nn.Sequential(nn.Linear(6, 1)).double())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.0), problem.objective, micro_batch=3, noise=1)
    result = update(take_rows(problem.batch(list(range(12))), torch.arange(6) + 6 * torch.distributed.get_rank()))
    return result.noise_scale, result.noise_reason


def test_a_sharded_model_says_that_it_cannot_be_measured():
    scale, reason = on_ranks(2, sharded)[0]
    assert scale is None
    assert "fully_shard" in reason
