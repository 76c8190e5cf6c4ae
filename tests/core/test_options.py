"""`UpdateOptions`: one value for all options; single keywords win, and the rarer ones go on working."""

import inspect

import pytest
import torch
from torch import nn

from anybatch import Accumulator, ArgumentsError, Update, UpdateError, UpdateOptions, supervised

SPELLED_OUT = (
    "model optimizer objective micro_batch clip_norm scheduler scaler autocast batch_norm on_nonfinite check on_update "
    "options"
)
"""Frozen: a new argument of `Update` needs a reason in its commit; options that few need go into `UpdateOptions`."""


def update(**options: object) -> Update:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=4, **options)  # type: ignore[arg-type]


def test_the_arguments_of_an_update_are_these():
    assert [name for name in inspect.signature(Update).parameters if name != "more"] == SPELLED_OUT.split()


def test_options_are_those_of_the_update():
    options = UpdateOptions(clip_norm=2.0, on_nonfinite="skip", noise=4)
    made = update(options=options)
    assert made.options == made.running == options
    assert (made.clip_norm, made.on_nonfinite) == (2.0, "skip")


def test_keywords_win_over_options_and_leave_the_others():
    made = update(options=UpdateOptions(clip_norm=2.0, on_empty="step", offload="disk"), clip_norm=1.0, offload=None)
    assert made.options == UpdateOptions(clip_norm=1.0, on_empty="step", offload=None)


def test_every_option_is_taken_as_a_keyword_as_before():
    given = {"clip_value": 0.5, "offload": "disk", "on_empty": "step", "reshard": False, "prefetch": True, "noise": 8}
    assert update(**given, sums="param").options == UpdateOptions(**given, sums="param")  # type: ignore[arg-type]
    assert update(running=UpdateOptions(noise=3)).options.noise == 3
    assert update(observer=print).observer is print


def test_an_accumulator_takes_the_same_value():
    options = UpdateOptions(batch_norm="exact", prefetch=True)
    accumulator = Accumulator(nn.Linear(4, 2), supervised(nn.MSELoss()), micro_batch=4, options=options)
    assert accumulator.options is options


@pytest.mark.parametrize("wrong", [3, {"clip_norm": 1.0}, "exact"])
def test_options_of_another_type_are_refused_by_name(wrong):
    with pytest.raises(UpdateError, match=r"options=.* is a \w+; expected UpdateOptions"):
        update(options=wrong)


def test_an_unknown_keyword_is_refused_with_the_nearest_name():
    with pytest.raises(ArgumentsError, match="has no argument 'on_emtpy'; did you mean on_empty"):
        update(on_emtpy="skip")


def test_two_ways_of_clipping_are_refused_wherever_they_come_from():
    with pytest.raises(UpdateError, match="are both given; choose one"):
        update(options=UpdateOptions(clip_norm=1.0), clip_value=1.0)
