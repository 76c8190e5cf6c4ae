"""Predicted peaks against the profiler's, and that planning leaves no trace."""

import copy
import json

import pytest
import torch
from torch import nn

from anybatch import (
    Accumulator,
    Coupled,
    Objective,
    PlanError,
    Tokens,
    Update,
    info_nce,
    measure_peak,
    plan,
    supervised,
)
from anybatch.core import Running
from anybatch.memory.envelope import fit_envelope
from anybatch.memory.recorder import Timeline
from benchmarks.models import LongAttention

CLASSES = supervised(nn.CrossEntropyLoss())


def wide(**kwargs):
    torch.manual_seed(0)
    layers = [nn.Linear(32, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)]
    model = nn.Sequential(*layers).to(**kwargs)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def rows(count=64):
    return torch.randn(count, 32), torch.randint(0, 4, (count,))


def measured(model, optimizer, objective, batch, size):
    update = Update(model, optimizer, objective, micro_batch=size, check="off", batch_norm="micro")
    update(batch)  # fills the optimizer's state
    return measure_peak(update, batch)[1]


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_the_prediction_from_fake_tensors_is_the_measured_peak(size):
    model, optimizer = wide()
    batch = rows()
    planned = plan(model, optimizer, CLASSES, batch, memory="1GiB", checkpointing=False)
    assert planned.method == "fake tensors"
    inside = planned.peak(size) - planned.outside(size)
    assert inside == pytest.approx(measured(model, optimizer, CLASSES, batch, size), rel=2e-3)


def test_attention_keeps_a_matrix_that_is_predicted_and_the_whole_batch_is_tried_as_one():
    torch.manual_seed(0)
    model, tokens = LongAttention(), torch.randint(0, 256, (16, 128))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), (tokens, tokens)
    planned = plan(model, optimizer, CLASSES, batch, memory="6MiB", margin=0)
    assert 0 < planned.micro_batch < 16
    assert planned.needs_accumulation
    assert planned.is_confirmed
    assert planned.peak(planned.micro_batch) <= 6 * 2**20 < planned.peak(planned.micro_batch + 1)
    assert planned.breakdown.total == planned.peak_bytes
    assert measured(model, optimizer, CLASSES, batch, planned.micro_batch) <= 6 * 2**20
    inside = planned.whole_bytes - planned.outside(16)
    assert inside == pytest.approx(measured(model, optimizer, CLASSES, batch, 16), rel=2e-3)


def test_a_line_per_op_gives_the_peak_and_a_line_through_two_peaks_does_not():
    # the step's peak is high and flat, backward's is low and steep: they cross between the sizes tried and those asked for
    def timeline(size):
        return Timeline(("backward", "step"), (100 + 50 * size, 1000))

    envelope = fit_envelope([(2, None), (3, None)], [timeline(2), timeline(3)])
    secant = timeline(2).peak + (64 - 2) * (timeline(3).peak - timeline(2).peak)
    assert envelope.peak((64, None)) == timeline(64).peak == 3300
    assert secant == 1000


def test_a_line_through_two_peaks_is_off_on_a_real_model():
    model, optimizer = wide()
    batch = rows(2048)
    planned = plan(model, optimizer, CLASSES, batch, memory="1GiB", checkpointing=False)
    truth = measured(model, optimizer, CLASSES, batch, 1024)
    secant = planned.peak(2) + (1024 - 2) * (planned.peak(3) - planned.peak(2))
    assert planned.peak(1024) - planned.outside(1024) == pytest.approx(truth, rel=2e-3)
    assert abs(secant / truth - 1) > 0.2


def test_convolutions_are_tried_in_small_and_batch_norm_statistics_of_all_micro_batches_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 3, 16, 16), torch.randint(0, 4, (32,))
    planned = plan(model, optimizer, CLASSES, batch, memory="1GiB", batch_norm="micro")
    assert planned.method == "real steps"
    assert "a convolution" in planned.reason
    for size in (1, 4, 16):
        truth = measured(model, optimizer, CLASSES, batch, size)
        assert planned.peak(size) - planned.outside(size) == pytest.approx(truth, rel=0.03)


class Reads(nn.Module):
    """Looks at its numbers, which fake tensors do not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, x):
        return self.layer(x) * (1 if x.sum().item() > 0 else 2)


def test_what_needs_numbers_is_tried_really_and_without_numbers_refused():
    model = Reads()
    planned = plan(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, rows(), memory="1GiB")
    assert planned.method == "real steps"
    assert "DataDependentOutputException" in planned.reason
    with torch.device("meta"):
        model = Reads()
    with pytest.raises(
        PlanError, match=r"cannot be predicted: .*DataDependentOutput.*needs a model and a batch that hold"
    ):
        plan(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, rows(), memory="1GiB")


@pytest.mark.parametrize("kind", [nn.Tanh, Reads])
def test_planning_leaves_everything_as_it_was(kind):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(), kind(), nn.LazyLinear(4))
    batch = rows()
    Update(
        model,
        optimizer := torch.optim.AdamW(model.parameters()),
        CLASSES,
        micro_batch=32,
        batch_norm="micro",
        check="off",
    )(batch)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), batch))
    plan(model, optimizer, CLASSES, batch, memory="1MiB", batch_norm="micro")
    after = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), batch)
    assert str(before) == str(after)
    for name, value in before[0].items():
        assert torch.equal(value, model.state_dict()[name])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert type(parameter) is nn.Parameter
    assert torch.equal(before[2], torch.get_rng_state())


def test_a_model_on_meta_is_planned_for_a_card_that_is_not_here():
    model, optimizer = wide(device="meta")
    planned = plan(model, optimizer, CLASSES, rows(), memory="6GiB", device="cuda")
    assert planned.breakdown.parameters == sum(one.nbytes for one in model.parameters())
    assert planned.device == "cuda"
    assert any("context" in note for note in planned.notes)
    # foreach, as on a GPU: parameters, gradients, two moments, and a temporary of all parameters at once
    assert planned.peak(2) == pytest.approx(5 * planned.breakdown.parameters, rel=0.01)


def test_not_even_one_row_is_a_plan_that_names_the_need():
    model, optimizer = wide()
    planned = plan(model, optimizer, CLASSES, rows(), memory="100KiB")
    assert (planned.micro_batch, planned.fits) == (0, False)
    assert planned.least_bytes > 100 * 1024
    assert planned.describe().startswith("Not even one row fits: it needs ")
    assert json.loads(json.dumps(planned.as_dict()))["fits"] is False


class ReadsTokens(LongAttention):
    def forward(self, ids):
        assert ids.max().item() < 256
        return super().forward(ids)


@pytest.mark.parametrize(("kind", "memory"), [(LongAttention, "3MiB"), (ReadsTokens, "3MiB"), (ReadsTokens, "2MiB")])
def test_a_budget_of_tokens_bounds_the_worst_micro_batch(kind, memory):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = torch.arange(8, 72, 4)
    mask = (torch.arange(72) < lengths[:, None]).long()
    ids = torch.randint(0, 256, (16, 72))
    batch = {"ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}
    objective = Objective(
        lambda model, batch: nn.functional.cross_entropy(model(batch["ids"]), batch["labels"]),
        lambda batch: (batch["labels"] != -100).sum(),
    )
    planned = plan(model, optimizer, objective, batch, memory=memory, margin=0, split=Tokens(10_000))
    assert planned.unit == "tokens"
    assert (planned.method == "real steps") == (kind is ReadsTokens)
    assert 68 <= planned.micro_batch < 16 * 72
    peak = measured(model, optimizer, objective, batch, Tokens(planned.micro_batch))
    assert peak <= planned.limit
    assert planned.peak(planned.micro_batch) <= planned.limit < planned.peak(planned.micro_batch + 68)


def test_a_coupled_loss_is_tried_with_all_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objective = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce())
    batch = torch.randn(64, 32), torch.randn(64, 32)
    planned = plan(model, optimizer, objective, batch, memory="520KiB", margin=0)
    assert 0 < planned.micro_batch < 64
    truth = measured(model, optimizer, objective, batch, planned.micro_batch)
    inside = planned.peak(planned.micro_batch) - planned.outside(planned.micro_batch)
    assert inside == pytest.approx(truth, rel=0.03)


def test_a_margin_of_nonsense_is_refused():
    model, optimizer = wide()
    with pytest.raises(PlanError, match=r"margin=1.5\): expected a share"):
        plan(model, optimizer, CLASSES, rows(), memory="1GiB", margin=1.5)


def test_a_check_is_ignored_with_a_deprecation_warning():
    model, optimizer = wide()
    options = {"memory": "1GiB", "checkpointing": False}
    with pytest.warns(DeprecationWarning, match=r"plan\(check='full'\) is deprecated and ignored"):
        asked = plan(model, optimizer, CLASSES, rows(), check="full", **options)
    assert asked.peak(8) == plan(model, optimizer, CLASSES, rows(), **options).peak(8)


def test_a_second_set_of_gradients_counts_where_single_micro_batches_are_dropped():
    model, optimizer = wide()
    batch, running = rows(), Running(on_nonfinite="drop")
    planned = plan(model, optimizer, CLASSES, batch, memory="1GiB", running=running, checkpointing=False)
    update = Update(model, optimizer, CLASSES, micro_batch=8, check="off", running=running)
    update(batch)
    truth = measure_peak(update, batch)[1]
    assert planned.method == "fake tensors"
    assert planned.peak(8) - planned.outside(8) == pytest.approx(truth, rel=5e-3)
    without = plan(model, optimizer, CLASSES, batch, memory="1GiB", checkpointing=False)
    assert without.peak(8) < 0.9 * truth


def test_gradients_that_are_there_already_count_where_the_caller_adds_to_them():
    model, _ = wide()
    batch = rows()
    empty = plan(model, None, CLASSES, batch, memory="1GiB", checkpointing=False).peak(8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    there = plan(model, None, CLASSES, batch, memory="1GiB", checkpointing=False).peak(8)
    assert there >= empty + 0.9 * sum(parameter.nbytes for parameter in model.parameters())


def test_a_coupled_loss_has_a_curve_between_the_sizes_that_were_tried():
    model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coupled = Coupled(lambda twin, pair: (twin(pair[0]), twin(pair[1])), info_nce(temperature=0.5))
    batch = torch.randn(64, 32), torch.randn(64, 32)
    planned = plan(model, optimizer, coupled, batch, memory="1GiB", checkpointing=False)
    for size in (1, 6, 24):
        truth = measured(model, optimizer, coupled, batch, size)
        assert 0.99 * truth <= planned.peak(size) - planned.outside(size) <= 1.03 * truth, size


def test_sums_in_the_parameters_own_dtype_are_chosen_only_where_fp32_does_not_fit_and_the_end_says_what_to_change():
    layers = [nn.Linear(256, 256) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(256, 4)).to(device="meta", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 256).bfloat16(), rows()[1]

    def planned(memory, sums):
        return plan(
            model, optimizer, CLASSES, batch, memory=memory, device="cuda", sums=sums, margin=0, checkpointing=False
        )

    ample, less = (planned("1GiB", sums) for sums in ("fp32", "param"))
    assert less.whole_bytes < ample.whole_bytes
    between = max(less.whole_bytes, less.least_bytes) + (ample.whole_bytes - less.whole_bytes) // 2
    chosen = planned(between, "auto")
    assert (chosen.sums, chosen.fits) == ("param", True)
    assert "0.018 after 256" in chosen.describe()
    assert planned("1GiB", "auto").sums == "fp32"
    short = planned(between, "fp32")
    assert 'sums="param"' in short.describe().splitlines()[-1]
    assert chosen.describe().splitlines()[-1] == "Nothing has to be changed for it to fit."


def test_sums_in_bf16_lose_digits_that_fp32_keeps():
    torch.manual_seed(0)
    gradients = {}
    batch = torch.randn(256, 32).bfloat16(), torch.randint(0, 4, (256,))
    for sums in ("fp32", "param"):
        model, _ = wide(dtype=torch.bfloat16)
        model[2] = nn.Identity()
        Accumulator(model, CLASSES, micro_batch=1, running=Running(sums=sums)).backward(batch)
        gradients[sums] = torch.cat([one.grad.double().flatten() for one in model.parameters()])
    model, _ = wide(dtype=torch.bfloat16)
    model[2] = nn.Identity()
    exact = model.double()
    Accumulator(exact, CLASSES, micro_batch=256).backward((batch[0].double(), batch[1]))
    truth = torch.cat([one.grad.flatten() for one in exact.parameters()])
    off = {sums: float((found - truth).norm() / truth.norm()) for sums, found in gradients.items()}
    assert 3 * off["fp32"] < 0.012 < off["param"]
