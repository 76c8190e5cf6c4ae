"""verify itself: what it leaves alone, its floor, its memory, its errors, and what the verdict says."""

import copy
import json
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import (
    Accumulator,
    BatchError,
    Coupled,
    Objective,
    SettingsError,
    VerifyError,
    clip_loss,
    supervised,
    verify,
    windows,
)
from anybatch.verification.case import make_case
from anybatch.verification.floor import Floor, Gradient, floor_of
from anybatch.verification.precision import HigherPrecision
from anybatch.verification.verify import rows_that_fit
from tests.reference import whole_batch_gradient
from tests.setups import seeded
from tests.verification.sound import ROWS, both, cnn, images, mlp, rows_of_numbers, towers

CROSS_ENTROPY = supervised(nn.CrossEntropyLoss())


_seeded = seeded(11)


def test_model_gradients_buffers_random_states_and_batch_are_left_alone():
    model, (inputs, targets) = cnn(nn.BatchNorm2d), images()
    loss = clip_loss()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()], inputs.clone()
    grads = [p.grad for p in model.parameters()]
    state, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    verify(model, CROSS_ENTROPY, (inputs, targets), batch_norm="micro")
    verify(towers(), Coupled(both, loss), (torch.zeros(4, 6) + torch.eye(4, 6), torch.eye(4, 6)))
    assert loss.log_scale.grad is None
    assert all(torch.equal(now, before[0][name]) for name, now in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(grad, old) for grad, old in zip(grads, before[1], strict=True))
    assert torch.equal(inputs, before[2])
    assert (np.random.get_state()[1] == numbers).all()
    state_after_towers = torch.get_rng_state()
    torch.set_rng_state(state)
    towers()
    assert torch.equal(torch.get_rng_state(), state_after_towers)  # only making the towers has drawn
    assert torch.get_default_dtype() == torch.float32


def test_the_gradient_in_one_go_is_the_references():
    model, batch = mlp(), rows_of_numbers()
    case = make_case(model, CROSS_ENTROPY, batch, precision="float64")
    found = torch.cat([grad.flatten() for grad in case.record().parameters.values()])
    reference = whole_batch_gradient(model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), batch)
    assert torch.allclose(found, reference, rtol=1e-14, atol=0)


def test_an_objective_that_uses_a_model_from_outside_is_told_so_and_the_model_is_put_back():
    model, batch = mlp(), rows_of_numbers()
    with pytest.raises(VerifyError, match=r"it uses a model from outside.*loss\(model, batch\)"):
        verify(model, Objective(lambda _, b: F.cross_entropy(model(b[0]), b[1])), batch)
    assert all(parameter.grad is None for parameter in model.parameters())


class Locked(nn.Module):
    """Cannot be copied: locks never can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = nn.Linear(6, 3), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def locked_twin(model: nn.Module) -> nn.Module:
    twin = Locked()
    twin.load_state_dict(model.state_dict())
    twin.to(next(model.parameters()).dtype)
    return twin


def test_a_model_that_cannot_be_copied_needs_a_function_that_makes_another():
    with pytest.raises(VerifyError, match=r"(?s)Locked cannot be copied \(TypeError.*copy=lambda model"):
        verify(Locked(), CROSS_ENTROPY, rows_of_numbers())
    assert verify(Locked(), CROSS_ENTROPY, rows_of_numbers(), copy=locked_twin).is_exact
    with pytest.raises(VerifyError, match="returned the model itself"):
        verify(Locked(), CROSS_ENTROPY, rows_of_numbers(), copy=lambda model: model)


def test_a_compiled_model_is_verified_by_the_model_inside():
    assert verify(torch.compile(mlp(), backend="eager"), CROSS_ENTROPY, rows_of_numbers()).is_exact


class OnlyFp32(nn.Module):
    """Refuses float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("float32 expected")
        return self.inner(x)


def test_a_model_that_refuses_float64_is_compared_in_its_own_precision_and_that_is_said():
    verdict = verify(OnlyFp32(), CROSS_ENTROPY, rows_of_numbers())
    assert verdict.is_exact
    assert {cut.precision for cut in verdict.cuts} == {"own"}
    assert "does not run in float64 (TypeError: float32 expected)" in verdict.notes[0]
    wrong = Objective(lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="sum"))
    assert [cause.kind for cause in verify(OnlyFp32(), wrong, rows_of_numbers()).causes] == ["sum"]


def test_casts_to_fp32_inside_a_model_stay_float64():
    with HigherPrecision():
        x = torch.ones(3, dtype=torch.float64) / 3
        assert x.float().dtype == x.to(torch.float32).dtype == x.softmax(0, dtype=torch.float32).dtype == torch.float64
        assert (x * torch.ones(3)).dtype == F.linear(x, torch.ones(2, 3)).dtype == torch.float64
        buffer = torch.zeros(3, dtype=torch.float64).add_(torch.ones(3))
        assert buffer.dtype == torch.float64


@pytest.mark.parametrize(("dtype", "small", "large"), [(torch.float32, 1e-7, 1e-4), (torch.bfloat16, 1e-3, 0.3)])
def test_the_floor_accepts_rounding_and_no_mistake(dtype, small, large):
    unit = torch.finfo(dtype).eps / 2
    whole = Gradient(1.0, {"weight": torch.ones(1000, dtype=torch.float64)})
    floor = floor_of(whole, [], unit)
    for error, is_exact in ((small, True), (large, False)):
        other = Gradient(1.0, {"weight": torch.ones(1000, dtype=torch.float64) * (1 + error)})
        assert floor.errors(other, 16)[0].is_exact is is_exact
        assert floor.errors(other, 16)[0].error == pytest.approx(error)


def test_a_noisy_whole_batch_does_not_raise_the_floor():
    whole, noisy = (Gradient(1.0, {"w": torch.randn(1000, dtype=torch.float64)}) for _ in range(2))
    floor = floor_of(whole, [noisy], 6e-8)
    assert floor == Floor(whole=whole, spread={"w": 0.0}, unit=6e-8)
    assert not floor.errors(noisy, 2)[0].is_exact


def test_a_parameter_without_gradient_is_exact_only_without_gradient():
    whole = Gradient(1.0, {"used": torch.ones(3).double(), "unused": None})
    floor = floor_of(whole, [], 6e-8)
    assert all(p.is_exact for p in floor.errors(whole, 4))
    other = Gradient(1.0, {"used": torch.ones(3).double(), "unused": torch.ones(3).double()})
    assert [p.is_exact for p in floor.errors(other, 4)] == [True, False]


def test_an_accumulation_that_goes_wrong_by_one_part_in_a_million_is_seen(monkeypatch):
    backward = Accumulator.backward

    def slightly_wrong(self, batch, **options):
        result = backward(self, batch, **options)
        for parameter in self.model.parameters():
            parameter.grad.mul_(1 + 1e-6)
        return result

    monkeypatch.setattr(Accumulator, "backward", slightly_wrong)
    verdict = verify(mlp(), CROSS_ENTROPY, rows_of_numbers())
    assert not any(cut.is_exact for cut in verdict.cuts if cut.precision == "float64")
    assert [cause.kind for cause in verdict.causes] == ["unknown"]


def test_with_memory_given_only_the_rows_that_fit_are_verified():
    model = nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 3))
    batch = torch.randn(256, 6), torch.randint(0, 3, (256,))
    case = make_case(model, CROSS_ENTROPY, batch)
    weights = sum(p.numel() for p in model.parameters()) * 8
    limit = 3 * weights + 64 * 2000 * 8 * 3
    rows = rows_that_fit(case, limit)
    assert 16 <= rows <= 128
    verdict = verify(model, CROSS_ENTROPY, batch, memory=limit, micro_batch=8)
    assert verdict.is_exact
    assert (verdict.rows, verdict.rows_given) == (rows, 256)
    assert f"{rows} of 256 rows" in verdict.describe()
    assert verify(model, CROSS_ENTROPY, rows_of_numbers(), memory="1GiB").rows == ROWS
    with pytest.raises(VerifyError, match=r"memory=10,000 bytes: 2 rows in one go take [\d,]+ bytes"):
        verify(model, CROSS_ENTROPY, batch, memory="10KB")


@pytest.mark.parametrize("memory", ["2", "GiB", 0, -1, True, 1.5])
def test_a_memory_that_is_no_size_is_refused(memory):
    with pytest.raises(SettingsError, match="is no memory size: expected a number above 0 with its unit"):
        verify(mlp(), CROSS_ENTROPY, rows_of_numbers(), memory=memory)


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(VerifyError, match="has 1 row"):
        verify(mlp(), CROSS_ENTROPY, (torch.randn(1, 6), torch.tensor([0])))
    with pytest.raises(VerifyError, match=r"expected supervised\(criterion\)"):
        verify(mlp(), F.cross_entropy, rows_of_numbers())
    with pytest.raises(VerifyError, match=r"expected a torch.nn.Module"):
        verify(lambda x: x, CROSS_ENTROPY, rows_of_numbers())
    with pytest.raises(BatchError):
        verify(mlp(), CROSS_ENTROPY, {})


def test_micro_batches_of_a_window_are_joined_and_taken_as_a_cut():
    parts = [(torch.randn(size, 6), torch.randint(0, 3, (size,))) for size in (4, 2, 5)]
    verdict = verify(mlp(), CROSS_ENTROPY, next(iter(windows(parts, 3))))
    assert verdict.is_exact
    given = next(cut for cut in verdict.cuts if cut.name == "as given")
    assert given.rows == (4, 2, 5)


def test_the_verdict_is_json_and_text():
    verdict = verify(cnn(nn.BatchNorm2d), CROSS_ENTROPY, images(), micro_batch=5)
    found = json.loads(json.dumps(verdict.as_json(), allow_nan=False))
    assert found["is_exact"] is False
    assert found["causes"][0]["kind"] == "batch_norm"
    assert {cut["name"] for cut in found["cuts"]} == {"as configured: Rows(size=5)"}  # 4, 4 and 3 rows are uneven
    assert found["cuts"][0]["parameters"][0].keys() == {"name", "error", "floor"}
    text = verdict.describe()
    assert text.startswith(f"not exact: {ROWS} rows, accumulated against the whole batch in one go")
    assert "cause (batch_norm): 2 BatchNorm layers" in text
    assert "\nfix: Use batch_norm='exact'" in text


def test_an_exact_verdict_names_no_cause():
    verdict = verify(mlp(), CROSS_ENTROPY, rows_of_numbers())
    assert verdict.describe().startswith("exact: ")
    assert "cause" not in verdict.describe()
    assert verdict.error < 1e-6
