"""What used to be acquitted, to crash, or to be called by a wrong name; each with the sound twin that must stay exact."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import anybatch
from anybatch import (
    Coupled,
    ExactnessError,
    Objective,
    Rows,
    Stacked,
    Terms,
    Tokens,
    Update,
    huggingface,
    supervised,
    verify,
)
from tests.setups import seeded
from tests.verification.sound import BERT, CLASSES, LENGTH, ROWS, llama, mlp, t5, texts

CE = supervised(nn.CrossEntropyLoss())


_seeded = seeded(17)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled(count: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 6), torch.randint(0, CLASSES, (count,))


def kinds(verdict):
    return [cause.kind for cause in verdict.causes]


# uneven cuts


@pytest.mark.parametrize(("count", "micro_batch"), [(4, None), (12, 4), (12, 6), (12, 2), (24, 8), (6, 2), (48, 12)])
def test_a_mean_of_means_is_seen_where_micro_batches_are_even(count, micro_batch):
    batch = labelled(count)
    verdict = verify(mlp(), Objective(loss_of, lambda batch: 1), batch, micro_batch=micro_batch)
    assert kinds(verdict) == ["units"], verdict.describe()
    assert "anybatch.rows" in verdict.causes[0].fix
    assert verify(mlp(), Objective(loss_of), batch, micro_batch=micro_batch).is_exact


def test_two_rows_have_no_uneven_cut_and_that_is_said():
    verdict = verify(mlp(), Objective(loss_of, lambda batch: 1), labelled(2))
    assert verdict.is_exact
    assert "no uneven cut" in verdict.notes[0]


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 5])
def test_the_check_never_cuts_its_sample_evenly(micro_batch):
    model = mlp()
    objective = Objective(loss_of, lambda batch: 1)
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), objective, micro_batch=micro_batch, check="first"
    )
    with pytest.raises(ExactnessError, match=r"cause \(units\)"):
        update(labelled(20))


# checkpointing


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**BERT, num_key_value_heads=2, num_local_experts=3)).train()


@pytest.mark.parametrize(("make", "use_reentrant"), [(llama, False), (llama, True), (t5, False), (mixtral, False)])
def test_checkpointed_models_are_compared_in_float64(make, use_reentrant):
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    verdict = verify(model, huggingface(), texts(), micro_batch=4)
    assert verdict.is_exact, verdict.describe()
    assert {cut.precision for cut in verdict.cuts} == {"float64", "own"}
    assert all(cut.error < 1e-12 for cut in verdict.cuts if cut.precision == "float64" and cut.decides)


# state anywhere


class Callable:
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        return loss_of(model, batch) * self.calls

    def method(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self(model, batch)


class CountingLoss(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, targets) * self.calls


def by_default(model: nn.Module, batch: tuple[Tensor, Tensor], calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return loss_of(model, batch) * calls[0]


def by_attribute(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    by_attribute.calls = getattr(by_attribute, "calls", 0) + 1
    return loss_of(model, batch) * by_attribute.calls


counting_loss = CountingLoss()
counting_object = Callable()
held_calls = [0]
STATES = {
    "a callable object": (Callable(), None),
    "a bound method": (counting_object.method, lambda: counting_object.calls),
    "a partial": (functools.partial(by_default, calls=held_calls), lambda: held_calls[0]),
    "a buffer of a loss module": (
        lambda model, batch: counting_loss(model(batch[0]), batch[1]),
        lambda: counting_loss.calls.item(),
    ),
}


@pytest.mark.parametrize("where", STATES)
def test_state_is_named_wherever_it_is_and_left_as_it_was(where):
    loss, left = STATES[where]
    verdict = verify(mlp(), Objective(loss), labelled())
    assert kinds(verdict) == ["state"], verdict.describe()
    assert left is None or left() == 0


class Shared:
    """Counts its calls in an attribute of the class."""

    calls = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        Shared.calls += 1
        return loss_of(model, batch) * Shared.calls


global_calls = 0


def by_global(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    global global_calls
    global_calls += 1
    return loss_of(model, batch) * global_calls


OUTSIDE = {
    "a default argument": (by_default, "a default of by_default"),
    "a function attribute": (by_attribute, "by_attribute.calls"),
    "a class attribute": (Shared(), "loss.calls"),
    "a global": (by_global, "global_calls"),
}


@pytest.mark.parametrize("where", OUTSIDE)
def test_state_outside_of_objects_is_named_and_never_written(where):
    loss, name = OUTSIDE[where]
    (cause,) = verify(mlp(), Objective(loss), labelled()).causes
    assert cause.kind == "state"
    assert f"A forward changes {name}" in cause.explanation
    assert "not put back" in cause.explanation
    model = mlp()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(loss), micro_batch=5)
    with pytest.raises(ExactnessError, match=rf"(?s)nothing but {name}.*cause \(state\)"):
        update(labelled())


def test_a_log_that_the_loss_keeps_is_exact_and_that_it_was_written_is_said():
    log: list[int] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        log.append(len(batch[0]))
        return loss_of(model, batch)

    verdict = verify(mlp(), Objective(loss), labelled())
    assert verdict.is_exact
    assert any("changes log, outside of the model" in note for note in verdict.notes)
    assert len(log) >= 5


def test_a_generator_that_the_objective_holds_is_replayed_and_left_where_it_was():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()

    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, (batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]))

    assert verify(mlp(), Objective(noisy), labelled()).is_exact
    assert torch.equal(generator.get_state(), before)
    model = mlp()
    Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Objective(noisy), micro_batch=12, check="first")(
        labelled()
    )
    moved = torch.Generator().manual_seed(5)
    torch.randn(12, 6, generator=moved)
    assert torch.equal(generator.get_state(), moved.get_state())  # one batch further, and not by the check


def test_a_head_that_a_closure_holds_is_compared_and_left_without_gradients():
    body, head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(head(model(batch[0]).tanh()), batch[1])

    def wrong_in_the_head(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        fixed = F.linear(model(batch[0]).tanh(), head.weight.detach(), head.bias.detach())
        return F.cross_entropy(fixed, batch[1]) + head.weight.sum() * batch[0].sum()

    sound = verify(body, Objective(loss), labelled())
    assert sound.is_exact
    assert {"head.weight", "head.bias"} <= {parameter.name for parameter in sound.cuts[0].parameters}
    assert not verify(body, Objective(wrong_in_the_head), labelled()).is_exact
    assert head.weight.grad is None
    assert head.weight.dtype == torch.float32


class Recurrent(nn.Module):
    """An LSTM whose forward counts, so that its state is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head, self.calls = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.lstm(x)[0][:, -1]) * self.calls


def series(count: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 5, 6), torch.randint(0, CLASSES, (count,))


def test_putting_state_back_leaves_the_weights_of_an_lstm_its_own():
    assert kinds(verify(Recurrent(), CE, series())) == ["state"]


def test_modules_of_a_copy_made_by_the_user_keep_their_modes():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    model[2].eval()
    seen = []

    def twin(model: nn.Module) -> nn.Module:
        other = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        other.load_state_dict(model.state_dict())
        seen.append(other)
        return other

    assert verify(model, CE, labelled(), copy=twin).is_exact
    assert all(not other[2].training and other[1].training for other in seen)


# draws


def seeded(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    torch.manual_seed(0)
    return loss_of(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))


def new_generator(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    noise = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(0))
    return loss_of(model, (batch[0] + noise, batch[1]))


def one_lambda(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model, (batch[0] * torch.rand(1), batch[1]))


def one_offset(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model, (batch[0].roll(int(torch.randint(0, 4, ())), 1), batch[1]))


def layer_drop(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    hidden = model[0](batch[0])
    return F.cross_entropy(model[3](hidden if torch.rand([]) < 0.1 else hidden.tanh()), batch[1])


def drawn_for_nothing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model, batch) if torch.rand([]) >= 0.0 else model[0].weight.sum()


@pytest.mark.parametrize("loss", [seeded, new_generator, one_lambda, one_offset, layer_drop])
def test_draws_that_are_not_the_rows_own_are_named(loss):
    verdict = verify(mlp(), Objective(loss), labelled())
    assert kinds(verdict) == ["draws"], verdict.describe()
    assert not verdict.is_exact


def test_a_shared_draw_that_changes_nothing_is_no_mistake():
    assert verify(mlp(), Objective(drawn_for_nothing), labelled()).is_exact


def test_mixup_by_randperm_is_coupling():
    def mixup(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        order = torch.randperm(len(batch[0]))
        outputs = model(0.3 * batch[0] + 0.7 * batch[0][order])
        return 0.3 * F.cross_entropy(outputs, batch[1]) + 0.7 * F.cross_entropy(outputs, batch[1][order])

    verdict = verify(mlp(), Objective(mixup), labelled())
    assert kinds(verdict) == ["coupled"]
    assert "collate_fn" in verdict.causes[0].fix


class Packed(nn.Module):
    """Dropout between the layers of an LSTM on packed rows: numbers of all tokens, in no order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(23, 8), nn.Linear(8, CLASSES)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        rows = nn.utils.rnn.pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(rows)[1][0][-1])


def rectified() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, CLASSES))


def test_what_cannot_be_replayed_could_not_be_judged_and_does_not_stop_training():
    batch = texts()["input_ids"], torch.randint(0, CLASSES, (ROWS,))
    for model, given in ((Packed(), batch), (rectified(), labelled())):
        verdict = verify(model, CE, given)
        assert (verdict.finding, verdict.is_judged, verdict.is_exact) == ("could not be judged", False, False)
        assert not verdict.causes
        update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), CE, micro_batch=5, check="first")
        assert update(given).applied
        assert update.guard.finding == "not judged"
    assert kinds(verify(rectified(), Objective(loss_of, lambda batch: 1), labelled())) == ["units"]


# causes


def residual(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def ratio(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = model(batch[0]).sigmoid()
    return 1 - 2 * (outputs * batch[1]).sum() / (outputs + batch[1].abs()).sum()


NOT_ADDITIVE = {
    "rmse": Objective(lambda model, batch: residual(model, batch).sqrt()),
    "log of a mean": Objective(lambda model, batch: residual(model, batch).log()),
    "hidden by detach": Objective(lambda model, batch: residual(model, batch) / residual(model, batch).detach()),
    "worst row": Objective(lambda model, batch: (model(batch[0]) - batch[1]).square().sum(1).max()),
    "ratio": Objective(ratio),
    "penalty in a sum": Objective(
        lambda model, batch: residual(model, batch) * len(batch[0]) + model[0].weight.square().sum(), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", NOT_ADDITIVE)
def test_a_loss_that_is_not_additive_is_called_so(name):
    verdict = verify(mlp(), NOT_ADDITIVE[name], (torch.randn(12, 6), torch.randn(12, CLASSES)))
    assert kinds(verdict) == ["not_additive"], verdict.describe()
    assert ("Terms(" if name == "penalty in a sum" else "Coupled(encode, loss)") in verdict.causes[0].fix


def test_a_recurrent_layer_that_takes_time_first_is_named_though_the_first_rows_do_not_change():
    (cause,) = verify(TimeFirst(), CE, series()).causes
    assert cause.kind == "coupled"
    assert "reads the rows as time" in cause.explanation
    assert "batch_first=True" in cause.fix


class TimeFirst(nn.Module):
    """Takes the rows for time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_inputs_that_the_objective_standardises_over_rows_are_named():
    def standardised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, ((batch[0] - batch[0].mean(0)) / batch[0].std(0), batch[1]))

    (cause,) = verify(mlp(), Objective(standardised), labelled()).causes
    assert cause.kind == "coupled"
    assert "before the model" in cause.explanation


def pairs(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch)[:, 0]
    return -F.logsigmoid(scores[::2] - scores[1::2]).mean()


def blocks(model: nn.Module, batch: Tensor) -> Tensor:
    scores = model(batch)[:, 0]
    return -F.logsigmoid(scores[: len(scores) // 2] - scores[len(scores) // 2 :]).mean()


def test_torn_pairs_are_named_with_the_split_that_keeps_them():
    batch = torch.randn(12, 6)
    for loss, micro_batch, groups in ((pairs, 3, "2"), (blocks, 4, "anybatch.Stacked(2)")):
        verdict = verify(mlp(), Objective(loss), batch, micro_batch=micro_batch)
        assert kinds(verdict) == ["groups"], verdict.describe()
        assert f"groups={groups})" in verdict.causes[0].fix
    assert verify(mlp(), Objective(pairs), batch, micro_batch=Rows(4, groups=2)).is_exact
    assert verify(mlp(), Objective(blocks), batch, micro_batch=Rows(4, groups=Stacked(2))).is_exact


def test_pairs_that_no_micro_batch_tears_are_exact_with_a_note():
    verdict = verify(mlp(), Objective(pairs), torch.randn(12, 6), micro_batch=6)
    assert verdict.is_exact
    assert "belong together" in verdict.notes[0]


def test_rows_of_another_dim_are_verified():
    model = nn.LSTM(6, 8)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0])[0].square().mean()

    batch = torch.randn(5, 9, 6), torch.randn(9)
    assert verify(model, Objective(loss), batch, micro_batch=Rows(2, batch_dim=1)).is_exact


def test_an_encode_that_looks_at_other_rows_is_named():
    def centred(model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch)
        return outputs - outputs.mean(0)

    spread = lambda rows: rows.square().mean() + rows.std(0).sum()  # noqa: E731
    (cause,) = verify(mlp(), Coupled(centred, spread), torch.randn(12, 6)).causes
    assert cause.kind == "coupled"
    assert "encode" in cause.explanation
    assert verify(mlp(), Coupled(lambda model, batch: model(batch), spread), torch.randn(12, 6)).is_exact


def test_the_term_whose_units_are_wrong_is_named():
    inputs, targets = labelled()
    targets[::3] = -100

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        outputs = model(batch[0])
        return {"fit": F.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}

    wrong = Terms(losses, units={"fit": anybatch.rows, "size": anybatch.rows})
    (cause,) = verify(mlp(), wrong, (inputs, targets)).causes
    assert cause.kind == "units"
    assert "'fit'" in cause.explanation
    assert "lambda batch: (batch[1] != -100).sum()" in cause.fix


def test_a_tensor_that_micro_batches_share_and_forward_writes_to_is_named():
    def scaled(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        batch[2].mul_(2)
        return F.cross_entropy(model(batch[0]) * batch[2].detach().clone(), batch[1])

    batch = (*labelled(), torch.tensor(1.0))
    assert kinds(verify(mlp(), Objective(scaled), batch)) == ["inputs"]
    assert batch[2] == 1


# near a minimum


def test_gradients_that_cancel_are_held_against_their_terms():
    inputs = torch.randn(12, 6)
    model = nn.Linear(6, 2, bias=False)
    targets = torch.randn(12, 2)
    model.weight.data = torch.linalg.lstsq(inputs.double(), targets.double()).solution.T.float().contiguous()
    assert verify(model, supervised(nn.MSELoss()), (inputs, targets)).is_exact
    met = mlp()
    assert verify(met, supervised(nn.MSELoss()), (inputs, met(inputs).detach()), micro_batch=3).is_exact
    wrong = Objective(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), lambda batch: 1)
    assert not verify(model, wrong, (inputs, targets)).is_exact


# printed fixes


def weighted(ignored: int = -100, smoothing: float = 0.0):
    weight = torch.tensor([0.2, 1.0, 20.0])
    return lambda model, batch: F.cross_entropy(
        model(batch[0]), batch[1], weight=weight, ignore_index=ignored, label_smoothing=smoothing
    )


def by_hand(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    weights = CLASS_WEIGHTS[batch[1]]
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum() / weights.sum()


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 20.0])


def ignoring(value: int):
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], ignore_index=value)


def with_lengths(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]).sum() / batch[2].sum()


def confident(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = model(batch[0])
    sure = outputs.detach().amax(1) > 0
    return F.cross_entropy(outputs[sure], batch[1][sure])


PRINTED = {
    "class weights": (Objective(weighted()), labelled),
    "class weights, ignored": (Objective(weighted(-100)), lambda: _some(-100)),
    "class weights, class ignored": (Objective(weighted(1)), labelled),
    "class weights by hand": (Objective(by_hand), labelled),
    "another value ignored": (Objective(ignoring(2)), labelled),
    "integer lengths": (Objective(with_lengths), lambda: (*labelled(), torch.randint(1, 9, (12,)))),
    "known in forward": (Objective(confident), lambda: labelled(24)),
    "a sum": (Objective(lambda model, batch: loss_of(model, batch) * len(batch[0])), labelled),
    "a mean": (Objective(loss_of, reduction="sum"), labelled),
    "a mean over targets, called a sum": (Objective(loss_of, reduction="sum"), lambda: _some(-100)),
    "one": (Objective(loss_of, lambda batch: 1), labelled),
}


def _some(ignored: int) -> tuple[Tensor, Tensor]:
    inputs, targets = labelled()
    targets[::3] = ignored
    return inputs, targets


def applied(objective: Objective, fix: str) -> Objective:
    """The objective with what the fix says put in place, read off its words."""
    if fix.startswith("Give units="):
        names = {"anybatch": anybatch, "CLASS_WEIGHTS": CLASS_WEIGHTS}
        return replace(objective, units=eval(fix.removeprefix("Give units=").removesuffix("."), names))
    if "observed(loss)" in fix:
        return anybatch.observed(objective.loss)
    return replace(objective, reduction="sum" if "reduction='sum'" in fix else "mean")


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_fix_makes_it_exact(name):
    objective, make = PRINTED[name]
    batch, model = make(), mlp()
    verdict = verify(model, objective, batch)
    assert not verdict.is_exact
    for cause in verdict.causes:
        objective = applied(objective, cause.fix)
    again = verify(model, objective, batch)
    assert again.is_exact, verdict.describe() + again.describe()


# padding


class LooksAtPadding(nn.Module):
    """A mean over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(23, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


def test_a_coupled_loss_by_tokens_is_told_of_padding():
    batch = texts(has_labels=False)
    objective = Coupled(lambda model, batch: model(batch["input_ids"]), lambda rows: rows.std(0).mean())
    (cause,) = verify(LooksAtPadding(), objective, batch, micro_batch=Tokens(2 * LENGTH)).causes
    assert cause.kind == "padding"
    assert "Rows(n)" in cause.fix
    assert verify(LooksAtPadding(), objective, batch, micro_batch=3).is_exact


def test_the_self_check_cuts_by_tokens_where_that_trains():
    batch = texts(has_labels=False) | {"targets": torch.randint(0, CLASSES, (ROWS,))}
    objective = Objective(lambda model, batch: F.cross_entropy(model(batch["input_ids"]), batch["targets"]))
    for micro_batch, is_refused in ((Tokens(3 * LENGTH), True), (Rows(3), False)):
        model = LooksAtPadding()
        update = Update(
            model, torch.optim.SGD(model.parameters(), lr=0.1), objective, micro_batch=micro_batch, check="first"
        )
        if is_refused:
            with pytest.raises(ExactnessError, match=r"cause \(padding\)"):
                update(batch)
        else:
            assert update(batch).applied


# what an exact verdict costs


def test_an_exact_verdict_runs_the_batch_seven_times_at_most():
    seen: list[int] = []

    def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(batch[0]))
        return loss_of(model, batch)

    assert verify(mlp(0.2), Objective(counted), labelled(), micro_batch=4).is_exact
    assert sum(seen) <= 7 * 12
