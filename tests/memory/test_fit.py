"""Fit: the largest micro-batch that is predicted to fit; predicted once, and inside the limit when measured."""

import copy
import gc
import threading
import weakref
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
    plan,
    supervised,
)
from anybatch.core import Running, Workload
from anybatch.core.splits import as_split
from anybatch.memory import fastest_fit
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


def test_a_ragged_batch_is_fitted_by_tokens():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(twin: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return ((twin(batch["input_ids"]) * mask).sum(1) / mask.sum(1)).square().mean()

    lengths = torch.arange(64) % 30 + 2
    mask = (torch.arange(31) < lengths[:, None]).long()
    batch = {"input_ids": torch.randint(0, 10, (64, 31)), "attention_mask": mask}
    reference = whole_batch_gradient(model, loss, batch)
    for split in (Fit("150KiB"), Fit("150KiB", most=Tokens(200)), fastest_fit("150KiB")):
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
    fit_envelope = fastest_fit(300_000)
    update = update_with(fit_envelope)
    for seed in range(14):
        update(batch_of(256, seed))
    choice = fit_envelope.choice
    assert choice.fastest.is_settled
    assert max(trial.size for trial in choice.fastest.trials) <= choice.size < 256
    assert isinstance(fit_envelope._last.split, Auto)


def test_fastest_is_accepted_with_a_warning_and_is_a_search_by_rate_below_what_fits():
    with pytest.warns(
        DeprecationWarning, match=r"Fit\(fastest=True\) is deprecated, and checkpointing is no longer tried"
    ):
        asked = Fit("1MiB", fastest=True)
    assert repr(asked) == repr(fastest_fit("1MiB"))
    update_with(asked)(batch_of(64))
    assert isinstance(asked._last.split, Auto)
    with pytest.warns(DeprecationWarning, match=r"Fit\(fastest=False\) is deprecated"):
        assert repr(Fit("1MiB", fastest=False)) == repr(Fit("1MiB"))


def test_the_cpu_leaves_a_larger_margin_than_an_accelerator_unless_told_otherwise():
    model = wide()
    parts = model, torch.optim.AdamW(model.parameters()), CLASSES, batch_of(64)
    margins = [plan(*parts, memory="1GiB", device=device).margin for device in ("cpu", "cuda")]
    assert margins == [planning.MARGIN_ON_CPU, planning.MARGIN]
    fit = Fit(400_000)
    update_with(fit)(batch_of(512))
    assert fit.choice.plan.margin == planning.MARGIN_ON_CPU
    assert fit.choice.plan.peak_bytes <= (1 - planning.MARGIN_ON_CPU) * 400_000
    assert plan(*parts, memory="1GiB", margin=0.01).margin == 0.01


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


def test_what_cannot_be_tried_at_all_doubles_and_a_warning_says_that_the_limit_is_not_kept(monkeypatch):
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("one of a kind")

    monkeypatch.setattr(fit_module, "plan", refuses)
    update = update_with(Fit(150_000))
    with pytest.warns(UserWarning, match=r"cannot be kept: .* could not be predicted \(RuntimeError: one of a kind\)"):
        first = update(batch_of(16)).micro_batches
    assert [first, *(update(batch_of(16)).micro_batches for _ in range(4))] == [16, 8, 4, 2, 1]


def test_a_split_that_is_copied_while_a_batch_is_at_hand_copies_no_model():
    fit, model = Fit("20MiB"), nn.Linear(16, 4)
    batch = torch.randn(64, 16), torch.randint(0, 4, (64,))
    objective = CLASSES
    fit.choose_for(Workload(model=model, objective=objective, options=Running()), batch)
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        copy.deepcopy(model)
    assert len(copy.deepcopy(fit).cut(batch)) == 1  # as a look at the first batch does


def test_a_split_holds_no_model_when_its_batch_has_run():
    fit, model = Fit("20MiB"), nn.Linear(16, 4)
    update = Update(model, torch.optim.SGD(model.parameters()), CLASSES, micro_batch=fit, check="off")
    update((torch.randn(64, 16), torch.randint(0, 4, (64,))))
    alive = weakref.ref(model)
    del model, update
    gc.collect()
    assert alive() is None


def test_all_micro_batches_but_the_last_are_full_and_the_last_is_no_single_row():
    fit, sizes = Fit("2MiB"), []
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))
    model[0].register_forward_hook(lambda layer, inputs, output: sizes.append(len(output)))
    update = Update(model, torch.optim.SGD(model.parameters()), CLASSES, micro_batch=fit, check="off")
    update((torch.randn(3000, 16), torch.randint(0, 4, (3000,))))
    full, sizes[:] = fit.choice.size, []
    update((torch.randn(2 * full + 1, 16), torch.randint(0, 4, (2 * full + 1,))))
    assert sizes == [full, full - 1, 2]
    assert [len(part) for part in Rows(full).cut(torch.empty(2 * full + 1, 1))] != sizes, "as equal as can be"
