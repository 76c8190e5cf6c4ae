"""Fit: the largest micro-batch that is predicted to fit; predicted once, and inside the limit when measured."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch.memory.fit as fit_module
import anybatch.memory.planning as planning
from anybatch import (
    Accumulator,
    Auto,
    Fit,
    MemoryLimitError,
    Objective,
    Rows,
    SplitError,
    Tokens,
    Update,
    measure_peak,
    plan,
    supervised,
)
from anybatch.batches.splits.micro_batch_option import as_split
from tests.injection import OutOfMemoryAbove
from tests.reference import relative_error, whole_batch_gradient

CLASSES = supervised(nn.CrossEntropyLoss())


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch_of(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def update_with(split: Any) -> Update:
    model = wide()
    return Update(model, torch.optim.AdamW(model.parameters()), supervised(nn.CrossEntropyLoss()), micro_batch=split)


@pytest.fixture
def num_plans(monkeypatch):
    made: list[int] = []
    real = fit_module.plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(fit_module, "plan", counted)
    return made


def test_after_memory_was_short_once_the_bound_of_before_comes_back_and_not_only_the_size_that_failed():
    fit = Fit("1GiB", most=16)
    update = update_with(fit)
    assert update(batch_of(27)).micro_batches == 2
    with OutOfMemoryAbove(13):
        assert update(batch_of(14)).retries == 1
    assert fit.bound == 7
    counts = [update(batch_of(27)).micro_batches for _ in range(31)]
    assert counts[-1] == 2
    assert fit.bound == 16
    assert update(batch_of(16)).micro_batches == 1


class Reading(nn.Module):
    """Looks at its numbers, so that only real steps can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x * float(x.abs().max() > 0))


def test_where_a_larger_batch_cannot_be_predicted_micro_batches_stay_as_large_as_before(monkeypatch):
    fit = Fit(400_000)
    update = update_with(fit)
    update(batch_of(128))  # in one piece: of more rows nothing is known yet
    size = fit.choice.size

    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(fit_module, "plan", refuses)
    assert update(batch_of(600)).micro_batches == -(-600 // size) < 600
    assert fit.choice.size == size > 1


def test_what_the_first_trial_loads_is_not_taken_for_free(monkeypatch):
    free = [1_000_000]
    real = planning.start_trials

    def loads(*args: Any) -> Any:
        free[0] = 400_000
        return real(*args)

    monkeypatch.setattr(planning, "start_trials", loads)
    monkeypatch.setattr(planning, "available_bytes", lambda device: free[0])
    model = wide()
    planned = plan(model, torch.optim.AdamW(model.parameters()), CLASSES, batch_of(64))
    assert planned.memory == 400_000 + sum(one.nbytes for one in model.parameters())


def test_a_trial_that_memory_runs_out_in_is_no_size_that_fits_and_smaller_ones_are_tried():
    model = Reading()
    optimizer = torch.optim.AdamW(model.parameters())
    with OutOfMemoryAbove(11):
        planned = plan(model, optimizer, CLASSES, batch_of(256), memory="1GiB")
    assert planned.method == "real steps"
    assert 8 <= planned.micro_batch <= 11
    assert planned.whole_bytes > planned.limit
    assert not optimizer.state


def test_a_batch_is_predicted_once_and_again_only_where_it_grows(num_plans):
    fit_envelope = Fit("1MiB")
    update = update_with(fit_envelope)
    for rows in (256, 256, 100, 256):
        update(batch_of(rows))
    assert len(num_plans) == 1
    update(batch_of(300))
    assert len(num_plans) == 2
    update(batch_of(256))
    assert len(num_plans) == 2


def test_the_longer_rows_are_the_smaller_is_the_micro_batch(num_plans):
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    objective = Objective(lambda twin, tokens: twin(tokens).square().mean())
    accumulator = Accumulator(model, objective, micro_batch=Fit("200KiB"))
    sizes = []
    for length in (16, 8, 64, 32, 16):
        accumulator.backward(torch.randint(0, 10, (64, length)))
        sizes.append(accumulator.split.choice.size)
    assert len(num_plans) == 3  # 8 long, all rows fit in one piece as they do 16 long
    assert sizes[0] == sizes[1] == sizes[4] == 64 > sizes[3] > sizes[2]
    accumulator.backward(torch.randint(0, 10, (80, 60)))
    assert len(num_plans) == 3, "more rows that are hardly shorter are as those that were planned for"
    assert sizes[2] - 1 <= accumulator.split.choice.size <= sizes[2]


def test_the_size_for_more_rows_is_the_one_that_a_plan_of_them_would_give(num_plans):
    fit = Fit(400_000)
    update = update_with(fit)
    update(batch_of(512))
    update(batch_of(900))
    assert len(num_plans) == 1
    derived, model = fit.choice.plan, wide()
    anew = plan(model, torch.optim.AdamW(model.parameters()), CLASSES, batch_of(900), memory=400_000, ranking=False)
    assert derived.micro_batch == anew.micro_batch < num_rows_planned(512)
    assert derived.peak_bytes == anew.peak_bytes
    assert derived.rows == anew.rows


def num_rows_planned(rows: int) -> int:
    model = wide()
    return plan(
        model, torch.optim.AdamW(model.parameters()), CLASSES, batch_of(rows), memory=400_000, ranking=False
    ).micro_batch


def test_a_ragged_batch_is_fitted_by_tokens():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(twin: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return ((twin(batch["input_ids"]) * mask).sum(1) / mask.sum(1)).square().mean()

    lengths = torch.arange(64) % 30 + 2
    mask = (torch.arange(31) < lengths[:, None]).long()
    batch = {"input_ids": torch.randint(0, 10, (64, 31)), "attention_mask": mask}
    reference = whole_batch_gradient(model, loss, batch)
    for split in (Fit("150KiB"), Fit("150KiB", most=Tokens(200)), Fit("150KiB", fastest=True)):
        accumulator = Accumulator(model, Objective(loss), micro_batch=split)
        model.zero_grad()
        result = accumulator.backward(batch)
        assert relative_error(model, reference) < 5e-7
        assert split.choice.kind == "tokens"
        assert result.micro_batches > 1
    assert Fit("150KiB", most=Tokens(200)).most.budget == 200


def test_a_row_that_cannot_fit_is_refused_with_the_predicted_need():
    with pytest.raises(
        MemoryLimitError, match=r"single row is predicted to need \d+\.\d KiB, and Fit\('30\.0 KiB'\) allows"
    ):
        update_with(Fit("30KiB"))(batch_of(8))


def test_out_of_memory_after_a_wrong_prediction_halves_and_says_so():
    fit_envelope = Fit("1GiB")
    update = update_with(fit_envelope)
    with OutOfMemoryAbove(20):
        results = [update(batch_of(64)) for _ in range(2)]
    assert [result.retries for result in results] == [2, 0]
    assert (fit_envelope.choice.size, fit_envelope.choice.retries) == (16, 2)
    assert "memory ran out 2 times all the same" in fit_envelope.choice.describe()
    with OutOfMemoryAbove(0), pytest.raises(MemoryLimitError, match=r"one row needs \d+\.\d KiB, as predicted"):
        update(batch_of(64))


def test_where_nothing_can_be_predicted_rows_double_until_they_do_not_fit(monkeypatch):
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("data-dependent")

    monkeypatch.setattr(fit_module, "plan", refuses)
    fit_envelope = Fit()
    update = update_with(fit_envelope)
    with OutOfMemoryAbove(5):
        counts = [update(batch_of(16)).micro_batches for _ in range(6)]
    assert counts == [16, 8, 4, 4, 4, 4]
    assert fit_envelope.choice.describe() == (
        "4 rows per micro-batch, found by doubling until memory ran out, because it could not be predicted: RuntimeError: "
        "data-dependent; memory ran out 1 times all the same."
    )


def test_auto_is_the_fastest_of_what_fits():
    assert repr(as_split("auto")) == "Fit(fastest=True)"
    fit_envelope = Fit(300_000, fastest=True)
    update = update_with(fit_envelope)
    for seed in range(14):
        update(batch_of(256, seed))
    choice = fit_envelope.choice
    assert choice.fastest.is_settled
    assert max(trial.size for trial in choice.fastest.trials) <= choice.size < 256
    assert isinstance(fit_envelope._last.split, Auto)


def test_predicting_leaves_weights_gradients_and_random_state_alone():
    update = update_with(Fit("300KB"))
    before = [parameter.detach().clone() for parameter in update.model.parameters()]
    random = torch.get_rng_state()
    update.accumulator.split.choose_for(update.accumulator.workload, batch_of(64))
    assert all(torch.equal(one, other) for one, other in zip(before, update.model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert not update.optimizer.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"most": "8"}, r"Fit\(most='8'\): give the largest"), ({"margin": 1}, r"Fit\(margin=1\): expected a share")],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(SplitError, match=message):
        Fit("1GiB", **arguments)


def test_alone_it_says_what_it_needs():
    with pytest.raises(
        SplitError, match=r"Fit\('1.0 GiB'\) chooses by the model and its optimizer, and has seen neither"
    ):
        Fit("1GiB").cut(batch_of(4))


class Locked(nn.Module):
    """Holds what nobody can copy."""

    def __init__(self, *, sees: bool = True) -> None:
        super().__init__()
        self.inside, self.lock, self.sees = wide(), threading.Lock(), sees

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.inside(x)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.sees:
            raise ValueError("this model is one of a kind")
        return super().__reduce_ex__(protocol)


def test_a_model_with_a_lock_is_predicted_on_a_copy_that_shares_it():
    model = Locked()
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(model)
    planned = plan(model, torch.optim.AdamW(model.parameters()), CLASSES, batch_of(64), memory=400_000)
    twin = wide()
    assert (
        planned.micro_batch
        == plan(twin, torch.optim.AdamW(twin.parameters()), CLASSES, batch_of(64), memory=400_000).micro_batch
    )


def test_what_cannot_be_copied_at_all_is_tried_in_place_and_left_as_it_was():
    model = Locked(sees=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    planned = plan(model, optimizer, CLASSES, batch_of(64), memory=400_000)
    assert planned.method == "real steps"
    twin = wide()
    seen = plan(twin, torch.optim.AdamW(twin.parameters()), CLASSES, batch_of(64), memory=400_000)
    assert planned.peak(8) == pytest.approx(seen.peak(8), rel=0.03)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_tried_at_all_is_measured_while_it_runs_and_stays_below_the_limit(monkeypatch):
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("one of a kind")

    monkeypatch.setattr(fit_module, "plan", refuses)
    limit = 150_000
    model = wide()
    fit = Fit(limit, margin=0)
    update = Update(model, torch.optim.AdamW(model.parameters()), CLASSES, micro_batch=fit, check="off")
    peaks = [measure_peak(update, batch_of(96, seed))[1] for seed in range(8)]
    assert max(peaks) <= limit
    assert fit.choice.size > 8
    assert peaks[-1] > 0.85 * limit
    assert "measured while training" in fit.choice.describe()
    doubled = update_with(Rows(fit.choice.size * 2))
    doubled(batch_of(96))
    assert measure_peak(doubled, batch_of(96))[1] > limit, "doubling until memory runs out would have gone beyond it"
