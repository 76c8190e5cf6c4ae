import math

import pytest
import torch
from torch import nn

from anybatch import SettingsError, Update, scale_lr, supervised, warmup


def sgd(lr=0.1):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def adam(beta2=0.999):
    return torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3, betas=(0.9, beta2))


def test_the_linear_rule_multiplies_by_the_ratio_and_the_square_root_rule_by_its_root():
    assert scale_lr(sgd(), batch=64, base_batch=16, rule="linear").lr == pytest.approx(0.4)
    assert scale_lr(sgd(), batch=64, base_batch=16, rule="sqrt").lr == pytest.approx(0.2)
    assert scale_lr(sgd(), batch=4, base_batch=16, rule="linear").lr == pytest.approx(0.025)


def test_every_group_is_scaled():
    one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [other], "lr": 0.01}])
    scale_lr(optimizer, batch=32, base_batch=8)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.04])


def test_adam_forgets_after_the_same_number_of_samples():
    optimizer = adam(beta2=0.999)
    scale_lr(optimizer, batch=64, base_batch=16, rule="sqrt")
    beta2 = optimizer.param_groups[0]["betas"][1]
    half_life_before = math.log(0.5) / math.log(0.999) * 16
    assert math.log(0.5) / math.log(beta2) * 64 == pytest.approx(half_life_before)


def test_beta2_stays_where_it_is_not_asked_for_or_there_is_no_rule():
    for arguments in ({"rule": "sqrt", "keep_half_life": False}, {"rule": "none"}):
        optimizer = adam()
        scale_lr(optimizer, batch=64, base_batch=16, **arguments)
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_no_rule_changes_nothing():
    scaling = scale_lr(sgd(), batch=64, base_batch=16, rule="none")
    assert (scaling.lr, scaling.factor, scaling.beta2) == (0.1, 1.0, None)


def test_scaling_after_a_scheduler_was_made_is_refused_with_the_order_to_use():
    optimizer = sgd()
    warmup(optimizer, 2)
    with pytest.raises(SettingsError, match="scale_lr first, then make the scheduler"):
        scale_lr(optimizer, batch=64, base_batch=16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0, "base_batch": 16}, r"batch=0"),
        ({"batch": 16, "base_batch": -1}, r"base_batch=-1"),
        ({"batch": 16, "base_batch": 1, "rule": "cubic"}, r"rule='cubic'.*none, linear, sqrt"),
    ],
)
def test_a_scaling_that_makes_no_sense_names_the_value(arguments, message):
    with pytest.raises(SettingsError, match=message):
        scale_lr(sgd(), **arguments)


def lrs_of(scheduler, optimizer, updates):
    seen = []
    for _ in range(updates):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_learning_rate_rises_evenly_and_stays():
    optimizer = sgd(1.0)
    assert lrs_of(warmup(optimizer, 3), optimizer, 6) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_a_linear_decay_ends_one_step_above_its_end():
    optimizer = sgd(1.0)
    scheduler = warmup(optimizer, 1, updates=5, decay="linear")
    assert lrs_of(scheduler, optimizer, 5) == pytest.approx([0.5, 1, 0.75, 0.5, 0.25])
    assert scheduler.get_last_lr() == [0.0]


def test_a_cosine_decay_agrees_with_torchs_own():
    ours, theirs = sgd(1.0), sgd(1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=8, eta_min=0.1)
    scheduler = warmup(ours, 0, updates=8, decay="cosine", end=0.1)
    assert lrs_of(scheduler, ours, 9) == pytest.approx(lrs_of(reference, theirs, 9))


def test_update_steps_it_once_per_batch_however_many_micro_batches():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = warmup(optimizer, 0, updates=4, decay="linear")
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=2, scheduler=scheduler)
    lrs = [update((torch.randn(7, 2), torch.randint(0, 2, (7,)))).lr for _ in range(4)]
    assert lrs == pytest.approx([1, 0.75, 0.5, 0.25])


def test_a_decay_with_no_room_after_the_warm_up_names_both_numbers():
    with pytest.raises(SettingsError, match="updates=10 after a warm-up of 10"):
        warmup(sgd(), 10, updates=10, decay="cosine")
    with pytest.raises(SettingsError, match="-1"):
        warmup(sgd(), -1)
    with pytest.raises(SettingsError, match="decay='step'"):
        warmup(sgd(), 1, decay="step")
