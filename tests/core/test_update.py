"""Update: one batch, one update, each part of it once and in order, and callbacks told once, after it."""

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from anybatch import Accumulator, NonFiniteError, Objective, Update, UpdateError, plan, supervised, windows
from tests.reference import gradient, mean_of_means, relative_error, whole_batch_gradient
from tests.setups import cross_entropy


def textbook() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1000, 10)
    return x, (x.sum(1) > 0).long()


def make(model: nn.Module, lr: float = 0.1, micro_batch: int = 16, **settings: Any) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch, **settings)


def test_the_textbook_task_every_update_of_an_epoch_is_the_whole_batchs():
    x, y = textbook()
    model = nn.Linear(10, 2)
    update, num_updates, seen = make(model), 0, 0
    for batch in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
        reference = whole_batch_gradient(model, cross_entropy, batch)
        result = update(batch)
        assert relative_error(model, reference) < 2e-7
        num_updates, seen = num_updates + 1, seen + result.units
    assert (num_updates, seen) == (16, 1000)


def test_the_textbook_loop_drops_40_samples_an_epoch():
    x, y = textbook()
    model, criterion, steps, seen, pending = nn.Linear(10, 2), nn.CrossEntropyLoss(), 0, 0, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (inputs, targets) in enumerate(DataLoader(TensorDataset(x, y), batch_size=16)):
        (criterion(model(inputs), targets) / 4).backward()
        pending += len(inputs)
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps, seen, pending = steps + 1, seen + pending, 0
    assert (steps, seen) == (15, 960)


def test_clipping_a_short_tail_is_clipping_the_whole_batch():
    x, y = textbook()
    model, batch = nn.Linear(10, 2), (x[:40] * 20, 1 - y[:40])
    reference = whole_batch_gradient(model, cross_entropy, batch)
    update = make(model, clip_norm=1.0)
    result = update(batch)
    assert float(result.grad_norm) == pytest.approx(float(reference.norm()), rel=1e-6)
    clipped = reference * min(1.0, 1.0 / (float(reference.norm()) + 1e-6))
    assert relative_error(model, clipped) < 5e-7


def test_clipping_the_sum_of_a_full_windows_shares_is_not():
    x, y = textbook()
    model, batch = nn.Linear(10, 2), (x[:40], y[:40])
    reference = whole_batch_gradient(model, cross_entropy, batch)
    limit = 0.9 * float(reference.norm())
    clipped = reference * limit / float(reference.norm())
    parts = list(zip(batch[0].split(16), batch[1].split(16), strict=True))
    mean_of_means(model, cross_entropy, parts)
    for parameter in model.parameters():
        parameter.grad *= 3 / 4  # a window of 4 that got only 3
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert relative_error(model, clipped) > 0.1


def test_clip_value_clamps_the_whole_batchs_gradient():
    x, y = textbook()
    model, batch = nn.Linear(10, 2), (x[:40], y[:40])
    reference = whole_batch_gradient(model, cross_entropy, batch)
    make(model, clip_value=0.05)(batch)
    assert relative_error(model, reference.clamp(-0.05, 0.05)) < 5e-7


def test_the_weights_do_not_depend_on_the_micro_batch():
    x, y = textbook()
    start, ends = nn.Linear(10, 2).double(), []
    for micro_batch in (64, 16, 7, 1):
        model = copy.deepcopy(start)
        update = make(model, micro_batch=micro_batch)
        for part in zip(x.double().split(64), y.split(64), strict=True):
            update(part)
        ends.append(model.weight.detach().clone())
    assert all(torch.allclose(end, ends[0], rtol=1e-12) for end in ends)


def test_micro_batches_from_a_loader_train_as_whole_batches_do():
    x, y = textbook()
    one, other = nn.Linear(10, 2).double(), nn.Linear(10, 2).double()
    other.load_state_dict(one.state_dict())
    data = TensorDataset(x.double(), y)
    whole, ready_made = make(one), make(other)
    for batch in DataLoader(data, batch_size=64):
        whole(batch)
    for batch in windows(DataLoader(data, batch_size=16), 4):
        ready_made(batch)
    assert torch.allclose(one.weight, other.weight, rtol=1e-12)


def test_each_part_happens_once_and_in_order():
    x, y = textbook()
    model, order = nn.Linear(10, 2), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    unscale, step, advance, refresh = scaler.unscale_, optimizer.step, scheduler.step, scaler.update
    scaler.unscale_ = lambda *args: (order.append("unscale"), unscale(*args))[1]  # type: ignore[method-assign]
    scaler.update = lambda *args: (order.append("scaler"), refresh(*args))[1]  # type: ignore[method-assign]
    scheduler.step = lambda *args: (order.append("scheduler"), advance(*args))[1]  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(lambda *args: order.append("step"))
    observed = lambda event: order.append(event.stage) if event.stage in ("zero", "clip", "backward") else None  # noqa: E731
    update = Update(
        model,
        optimizer,
        supervised(nn.CrossEntropyLoss()),
        micro_batch=16,
        clip_norm=1.0,
        scaler=scaler,
        scheduler=scheduler,
        observer=observed,
    )
    result = update((x[:40], y[:40]))
    assert order == ["zero", "backward", "backward", "backward", "unscale", "clip", "step", "scaler", "scheduler"]
    assert step is not None
    assert result.lr == 0.1
    assert scheduler.get_last_lr() == [0.05]


def test_a_scaled_update_is_the_unscaled_one():
    x, y = textbook()
    model = nn.Linear(10, 2)
    reference = whole_batch_gradient(model, cross_entropy, (x[:40], y[:40]))
    update = make(model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))
    result = update((x[:40], y[:40]))
    assert result.applied
    assert relative_error(model, reference) < 5e-7


def test_an_overflow_skips_the_update_and_the_scheduler_and_the_batch_can_be_given_again():
    x, y = textbook()
    model = nn.Linear(10, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    objective = supervised(nn.CrossEntropyLoss())
    update = Update(model, optimizer, objective, micro_batch=16, scaler=scaler, scheduler=scheduler)
    batch, weights = (x[:64] * 100, 1 - y[:64]), model.weight.detach().clone()
    result = update(batch)
    assert not result.applied
    assert torch.equal(model.weight, weights)
    assert not optimizer.state
    assert scheduler.get_last_lr() == [0.1]
    assert scaler.get_scale() == 2.0**126
    while not (result := update(batch)).applied:
        assert scheduler.get_last_lr() == [0.1]
    assert scheduler.get_last_lr() == [0.05]
    assert result.grad_norm.isfinite()


def test_a_scale_that_falls_for_ever_is_no_overflow_and_is_raised():
    model = nn.Linear(2, 2)
    update = make(model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**-20))
    batch = (torch.full((4, 2), torch.nan), torch.zeros(4, dtype=torch.long))
    with pytest.raises(NonFiniteError, match=r"loss scale has fallen to .* no overflow"):
        for _ in range(8):
            update(batch)


class Poisoned(nn.Module):
    """A model with BatchNorm, so that a bad row would also spoil the running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu())


def poisoned_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), torch.randint(0, 2, (12,))
    x[6, 1] = torch.nan
    return x, y


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_gradient_that_is_not_finite_names_the_parameter_and_the_micro_batch():
    model = Poisoned()
    update, before = make(model, micro_batch=4, batch_norm="micro"), state_of(model)
    with pytest.raises(
        NonFiniteError, match=r"'body\.weight' is not finite, first in micro-batch 1 of 3 .* loss is nan"
    ):
        update(poisoned_batch())
    assert same(before, state_of(model))
    assert not update.optimizer.state


def test_a_finite_loss_with_a_gradient_that_is_not_is_named_too():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    objective = Objective(lambda model, part: (model(part) - 1).abs().sqrt().mean())
    update = Update(model, torch.optim.SGD(model.parameters(), 0.1), objective, micro_batch=1)
    with pytest.raises(NonFiniteError, match=r"gradient of 'weight' .* micro-batch 2 of 3 .* loss is 0"):
        update(torch.tensor([[3.0], [2.0], [1.0]]))


def test_skip_leaves_weights_statistics_and_optimizer_as_they_were():
    model = Poisoned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    objective = supervised(nn.CrossEntropyLoss())
    policies = {"on_nonfinite": "skip", "batch_norm": "micro"}
    update = Update(model, optimizer, objective, micro_batch=4, scheduler=scheduler, **policies)
    x, y = poisoned_batch()
    update((x[:6], y[:6]))
    before, moments, steps = state_of(model), copy.deepcopy(optimizer.state_dict()), scheduler.last_epoch
    result = update((x, y))
    assert not result.applied
    assert same(before, state_of(model))
    assert scheduler.last_epoch == steps
    for index, state in moments["state"].items():
        assert same(state, optimizer.state_dict()["state"][index])


def test_drop_leaves_the_bad_micro_batch_out_and_renormalises_the_rest():
    torch.manual_seed(1)
    x, y = torch.randn(12, 3), torch.randint(0, 2, (12,))
    x[6, 1] = torch.inf
    model = nn.Linear(3, 2)
    rest = [0, 1, 2, 3, 8, 9, 10, 11]
    reference = whole_batch_gradient(model, cross_entropy, (x[rest], y[rest]))
    result = make(model, micro_batch=4, on_nonfinite="drop")((x, y))
    assert relative_error(model, reference) < 5e-7
    assert (result.applied, result.units, result.dropped, result.micro_batches) == (True, 8, (1,), 3)


def test_a_dropped_micro_batch_leaves_no_trace_in_batch_norm():
    model = Poisoned()
    result = make(model, micro_batch=4, on_nonfinite="drop", batch_norm="micro")(poisoned_batch())
    assert (result.applied, result.dropped) == (True, (1,))
    assert model.norm.running_mean.isfinite().all()
    assert int(model.norm.num_batches_tracked) == 1


def test_after_bf16_updates_the_users_own_loop_works_as_before():
    model = nn.Linear(3, 2).bfloat16()
    batch = (torch.randn(8, 3).bfloat16(), torch.randint(0, 2, (8,)))
    make(model, micro_batch=2)(batch)
    assert model.weight.grad.dtype == torch.float32, "SGD takes fp32 gradients"
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    cross_entropy(model, batch).backward()
    assert model.weight.grad.dtype == torch.bfloat16
    optimizer.step()
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=2).backward(batch)


def test_when_every_micro_batch_is_dropped_nothing_is_applied():
    model = nn.Linear(3, 2)
    weights = model.weight.detach().clone()
    batch = (torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.long))
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        result = make(model, micro_batch=2, on_nonfinite="drop", scaler=scaler)(batch)
        assert (result.applied, result.dropped) == (False, (0, 1))
        assert result.loss.isnan()
        assert torch.equal(model.weight, weights)


def test_ignore_does_not_look():
    model = nn.Linear(3, 2)
    result = make(model, on_nonfinite="ignore")((torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.long)))
    assert result.applied
    assert model.weight.isnan().all()


def test_an_exception_in_the_objective_changes_nothing_but_clears_the_gradients():
    model = Poisoned()
    before, calls = state_of(model), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a bad row")
        return cross_entropy(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    update = Update(model, optimizer, Objective(loss), micro_batch=4, batch_norm="micro", check="off")
    x, y = poisoned_batch()
    with pytest.raises(RuntimeError, match="a bad row"):
        update((x[:6].nan_to_num(), y[:6]))
        update((x[:6].nan_to_num(), y[:6]))
    assert same({k: v for k, v in before.items() if "running" in k}, state_of(model))


def test_two_models_two_optimizers_two_updates_train_a_gan_exactly():
    def players() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        critic = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        return (
            generator,
            critic,
            torch.optim.Adam(generator.parameters(), 1e-2),
            torch.optim.Adam(critic.parameters(), 1e-2),
        )

    def critic_loss(critic: nn.Module, generator: nn.Module, batch: Any) -> Tensor:
        real, noise = batch
        fake = generator(noise).detach()
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    def generator_loss(generator: nn.Module, critic: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-critic(generator(batch[1]))).mean()

    torch.manual_seed(1)
    batches = [(torch.randn(21, 1).double() + 2, torch.randn(21, 2).double()) for _ in range(5)]

    generator, critic, for_generator, for_critic = players()
    train_critic = Update(
        critic, for_critic, Objective(lambda model, batch: critic_loss(model, generator, batch)), micro_batch=4
    )
    train_generator = Update(
        generator, for_generator, Objective(lambda model, batch: generator_loss(model, critic, batch)), micro_batch=4
    )
    for batch in batches:
        train_critic(batch)
        train_generator(batch)

    whole_generator, whole_critic, for_generator, for_critic = players()
    for batch in batches:
        for_critic.zero_grad()
        critic_loss(whole_critic, whole_generator, batch).backward()
        for_critic.step()
        for_generator.zero_grad()
        generator_loss(whole_generator, whole_critic, batch).backward()
        for_generator.step()
    for mine, theirs in zip(
        [*generator.parameters(), *critic.parameters()],
        [*whole_generator.parameters(), *whole_critic.parameters()],
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=1e-9)


def test_frozen_and_shared_parameters():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight
            self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens) * self.scale)

    torch.manual_seed(0)
    model, batch = Tied(), (torch.randint(0, 9, (22,)), torch.randint(0, 9, (22,)))
    reference = whole_batch_gradient(model, cross_entropy, batch)
    update = make(model, micro_batch=5, clip_norm=1e3)
    update(batch)
    assert relative_error(model, reference) < 5e-7
    assert model.scale.grad is None
    assert torch.equal(model.scale, torch.ones(4))


def test_an_optimizer_of_part_of_the_model_clips_and_steps_that_part():
    x, y = textbook()
    model = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 2))
    head = model[2]
    update = Update(
        model,
        torch.optim.SGD(head.parameters(), lr=0.1),
        supervised(nn.CrossEntropyLoss()),
        micro_batch=16,
        clip_norm=0.01,
    )
    body = model[0].weight.detach().clone()
    first = update((x[:40], y[:40]))
    assert float(gradient(head.parameters()).norm()) == pytest.approx(0.01, rel=1e-3)
    assert torch.equal(model[0].weight, body)
    model[2].load_state_dict(head.state_dict())
    second = update((x[:40], y[:40]))
    assert float(second.grad_norm) == pytest.approx(float(first.grad_norm), rel=0.1), (
        "nothing was left over from before"
    )


def test_sparse_gradients_are_clipped_and_stepped():
    torch.manual_seed(0)
    model = nn.Embedding(20, 4, sparse=True)
    batch = (torch.randint(0, 20, (13, 5)), torch.randn(13, 5, 4))
    reference = whole_batch_gradient(
        nn.Embedding.from_pretrained(model.weight.detach(), freeze=False),
        lambda twin, whole: F.mse_loss(twin(whole[0]), whole[1]),
        batch,
    )
    update = Update(
        model, torch.optim.SparseAdam(model.parameters()), supervised(nn.MSELoss()), micro_batch=4, clip_norm=1e-3
    )
    before = model.weight.detach().clone()
    result = update(batch)
    assert float(result.grad_norm) == pytest.approx(float(reference.norm()), rel=1e-6)
    assert relative_error(model, reference * (1e-3 / (float(reference.norm()) + 1e-6))) < 5e-7
    assert not torch.equal(model.weight, before)


def test_an_odd_last_micro_batch_does_not_recompile_again_and_again():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    compiled = CompileCounter()
    x, y = textbook()
    model = nn.Linear(10, 2)
    reference = whole_batch_gradient(model, cross_entropy, (x[960:], y[960:]))
    fast = torch.compile(model, backend=compiled)
    update = Update(
        fast, torch.optim.SGD(model.parameters(), lr=0.0), supervised(nn.CrossEntropyLoss()), micro_batch=16
    )
    for _ in range(2):
        for rows in (64, 40, 63, 33, 17, 50):
            update((x[:rows], y[:rows]))
    update((x[960:], y[960:]))
    assert relative_error(model, reference) < 5e-7
    assert compiled.frame_count <= 3, "one for the first size, one for any other"


def test_a_batch_without_any_target_is_no_update():
    model = nn.Linear(3, 2)
    weights = model.weight.detach().clone()
    result = make(model)((torch.randn(4, 3), torch.full((4,), -100)))
    assert (result.applied, result.units, float(result.loss), float(result.grad_norm)) == (False, 0, 0.0, 0.0)
    assert torch.equal(model.weight, weights)


def test_chosen_it_is_a_step_with_zero_gradients():
    model = nn.Linear(3, 2)
    weights = model.weight.detach().clone()
    result = make(model, on_empty="step")((torch.randn(4, 3), torch.full((4,), -100)))
    assert (result.applied, result.units, float(result.loss), float(result.grad_norm)) == (True, 0, 0.0, 0.0)
    assert torch.equal(model.weight, weights)


def test_results_are_detached():
    x, y = textbook()
    result = make(nn.Linear(10, 2))((x[:40], y[:40]))
    assert not result.loss.requires_grad
    assert not result.grad_norm.requires_grad


def test_what_does_not_fit_together_is_refused_with_the_fix():
    model, other, objective = nn.Linear(2, 2), nn.Linear(2, 2), supervised(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UpdateError, match=r"LBFGS.*Use Accumulator"):
        Update(model, torch.optim.LBFGS(model.parameters()), objective, micro_batch=1)
    with pytest.raises(UpdateError, match="ReduceLROnPlateau steps on a validation loss"):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        Update(model, optimizer, objective, micro_batch=1, scheduler=plateau)
    with pytest.raises(UpdateError, match=r"clip_norm=1\.0 and clip_value=0\.5 are both given; choose one"):
        Update(model, optimizer, objective, micro_batch=1, clip_norm=1.0, clip_value=0.5)
    with pytest.raises(UpdateError, match=r"clip_norm=0: expected a number above 0"):
        Update(model, optimizer, objective, micro_batch=1, clip_norm=0)
    with pytest.raises(UpdateError, match=r"on_nonfinite='explode': expected one of raise, skip, drop, ignore"):
        Update(model, optimizer, objective, micro_batch=1, on_nonfinite="explode")
    with pytest.raises(UpdateError, match=r"clip_norm='1': expected a number above 0"):
        Update(model, optimizer, objective, micro_batch=1, clip_norm="1")
    with pytest.raises(UpdateError, match=r"scheduler='cosine': expected one of torch\.optim\.lr_scheduler"):
        Update(model, optimizer, objective, micro_batch=1, scheduler="cosine")
    with pytest.raises(UpdateError, match=r"scaler=True: expected a torch\.amp\.GradScaler"):
        Update(model, optimizer, objective, micro_batch=1, scaler=True)
    with pytest.raises(UpdateError, match="holds none of the parameters of this Linear"):
        Update(other, optimizer, objective, micro_batch=1)
    with pytest.raises(UpdateError, match=r"is a function; expected a torch\.nn\.Module"):
        Update(lambda x: x, optimizer, objective, micro_batch=1)
    with pytest.raises(UpdateError, match=r"autocast='bf16': expected a dtype, such as torch\.bfloat16"):
        Update(model, optimizer, objective, micro_batch=1, autocast="bf16")
    with pytest.raises(UpdateError, match=r"is a Linear; expected a torch\.optim\.Optimizer"):
        Update(model, model, objective, micro_batch=1)


def test_the_accumulator_inside_can_be_used_by_itself():
    x, y = textbook()
    model = nn.Linear(10, 2)
    update = make(model)
    assert isinstance(update.accumulator, Accumulator)
    assert update.accumulator.backward((x[:40], y[:40])).units == 40


def test_dropping_all_that_counts_beside_a_micro_batch_of_no_units_applies_nothing():
    model = nn.Linear(3, 2)
    x, y = torch.full((4, 3), torch.nan), torch.tensor([-100, -100, 0, 1])
    result = make(model, micro_batch=2, on_nonfinite="drop")((x, y))
    assert (result.applied, result.dropped, result.units) == (False, (1,), 0)


def test_a_batch_of_no_units_is_no_update_under_drop_either():
    model = nn.Linear(3, 2)
    result = make(model, micro_batch=2, on_nonfinite="drop")((torch.randn(4, 3), torch.full((4,), -100)))
    assert (result.applied, result.dropped, float(result.grad_norm)) == (False, (), 0.0)


BATCHES = [
    (torch.randn(12, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(12) % 2) for seed in range(4)
]
BAD = (torch.full((12, 3), torch.inf), torch.arange(12) % 2)


def made(**options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=5, on_nonfinite="skip", **options)


def test_a_callback_gets_the_result_when_the_weights_are_new():
    seen = []
    update = made(on_update=lambda result: seen.append((result, update.model.weight.detach().clone())))
    before = update.model.weight.detach().clone()
    result = update(BATCHES[0])
    assert seen[0][0] is result
    assert torch.equal(seen[0][1], update.model.weight)
    assert not torch.equal(seen[0][1], before)


def test_an_update_that_is_not_applied_tells_nobody():
    seen = []
    update = made(on_update=[seen.append, lambda result: seen.append(None)])
    assert not update(BAD).applied
    assert seen == []
    assert seen == [update(BATCHES[0]), None]


def test_an_average_of_the_weights_is_that_of_a_hand_written_loop_and_calling_it_for_a_skipped_update_is_not():
    def average(update):
        return AveragedModel(update.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    update = made()
    ema = average(update)
    update.on_update = (lambda result: ema.update_parameters(update.model),)
    twin = made()
    right, wrong = average(twin), average(twin)
    for batch in (*BATCHES[:2], BAD, *BATCHES[2:]):
        update(batch)
        if twin(batch).applied:
            right.update_parameters(twin.model)
        wrong.update_parameters(twin.model)
    assert torch.equal(ema.module.weight, right.module.weight)
    assert not torch.equal(ema.module.weight, wrong.module.weight)


def test_what_a_callback_raises_comes_out_and_the_update_stays_done():
    def full(result):
        raise OSError("no space left")

    update, twin = made(on_update=full), made()
    with pytest.raises(OSError, match="no space left"):
        update(BATCHES[0])
    twin(BATCHES[0])
    assert torch.equal(update.model.weight, twin.model.weight)


def test_planning_tells_nobody():
    seen = []
    update = made(on_update=seen.append)
    plan(update.model, update.optimizer, update.accumulator.objective, BATCHES[0], memory="1GiB")
    assert seen == []


@pytest.mark.parametrize("bad", [3, ["loss"], [print, None]])
def test_what_cannot_be_called_is_refused_with_an_example(bad):
    with pytest.raises(UpdateError, match=r"on_update=.*expected a function of the result, such as .*scalars"):
        made(on_update=bad)


class StandIn:
    """The part of Weights & Biases, MLflow and trackio that the docs use; they are too large to be installed for the tests."""

    def __init__(self):
        self.told = []

    def log(self, data):
        self.told.append((len(self.told) + 1, data))

    def log_metrics(self, metrics, step):
        self.told.append((step, metrics))


@pytest.mark.parametrize("name", ["Weights & Biases", "MLflow", "trackio"])
def test_the_line_of_the_docs_hands_each_logger_plain_numbers_by_update(name):
    text = (Path(__file__).parents[2] / "docs/logging.md").read_text()
    line = re.search(rf"^\| {name} \| `(lambda result: .+?)`", text, re.MULTILINE)[1]
    logger = StandIn()
    callback = eval(line, {"run": logger, "mlflow": logger, "trackio": logger, "steps": itertools.count(1)})
    update = made(on_update=callback)
    results = [update(batch) for batch in BATCHES[:2]]
    assert logger.told == [(number, result.scalars()) for number, result in enumerate(results, start=1)]
    assert {type(value) for _, told in logger.told for value in told.values()} == {float}
