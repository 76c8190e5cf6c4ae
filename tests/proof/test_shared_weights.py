"""The self-check runs on copies that share the model's weights: nothing of them is changed, whatever a run writes to them."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anybatch import ExactnessError, Objective, Rows, Tokens, Update, supervised
from anybatch.proof.cases import Gradient, GradientAside, SharedWeights
from anybatch.state import TensorFile

CLASSES = supervised(nn.CrossEntropyLoss())


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(3)


def labelled(count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 6), torch.arange(count) % 3


def checked(model: nn.Module, batch: Any, objective: Any = CLASSES, **options: Any) -> Update:
    """After a first batch of nothing but the check."""
    options = {"micro_batch": 4} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    update = Update(model, optimizer, objective, check=True, **options)
    update(batch)
    return update


class Clamping(nn.Module):
    """Writes to its weights and to a buffer in every forward, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data.mul_(0.5)
        self.seen += 1
        return self.linear(inputs)


def test_what_runs_write_to_shared_weights_is_put_back_to_the_bit():
    model = Clamping()
    with torch.no_grad():
        model.linear.bias[0] = float("nan")
    before = {name: held.clone() for name, held in model.state_dict().items()}
    pointers = {name: held.data_ptr() for name, held in model.state_dict().items()}
    shared = SharedWeights(model)
    for _ in range(2):
        twin = shared.twin()
        assert twin.linear.weight.data_ptr() == model.linear.weight.data_ptr()
        twin(torch.randn(2, 6)).sum().backward()
        assert not torch.equal(model.linear.weight, before["linear.weight"])
        shared.put_back()
    assert model.linear.weight.grad is None
    assert pointers == {name: held.data_ptr() for name, held in model.state_dict().items()}
    for name, held in model.state_dict().items():
        assert torch.equal(held.nan_to_num(7.0), before[name].nan_to_num(7.0))


def test_weights_of_other_strides_and_single_numbers_are_put_back():
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model.register_buffer("scale", torch.tensor(2.0))
    before = {name: held.clone() for name, held in model.state_dict().items()}
    shared = SharedWeights(model)
    with torch.no_grad():
        for held in (*model.parameters(), *model.buffers()):
            held += 1
    shared.put_back()
    assert all(torch.equal(held, before[name]) for name, held in model.state_dict().items())


def test_a_check_whose_forwards_write_to_the_weights_leaves_them_as_they_were():
    model = Clamping()
    before = model.linear.weight.clone()
    with pytest.raises(ExactnessError, match=r"(?s)nothing was changed.*cause \(state\).*linear\.weight"):
        checked(model, labelled())
    assert torch.equal(model.linear.weight, before)
    assert float(model.seen) == 0


def test_weights_in_bf16_are_raised_and_not_shared():
    model = nn.Linear(6, 3).bfloat16()
    twin = SharedWeights(model, torch.float32).twin()
    assert twin.weight.dtype is torch.float32
    assert torch.equal(twin.weight.bfloat16(), model.weight)
    update = checked(model, (labelled()[0].bfloat16(), labelled()[1]))
    assert update.guard.finding == "passed"
    assert 0 < update.guard.error < 1e-6  # bf16 alone is 1e-3 off
    assert model.weight.dtype is torch.bfloat16


def test_autocast_is_compared_in_fp32():
    update = checked(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), labelled(), autocast=torch.bfloat16)
    assert update.guard.finding == "passed"
    assert update.guard.error < 1e-6


class Scaling(nn.Module):
    """Writes to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs.mul_(2)
        return self.linear(inputs)


def test_rows_that_a_forward_writes_to_are_taken_anew_and_the_batch_is_not_written_to():
    model, batch = Scaling(), labelled()
    given = batch[0].clone()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.0), CLASSES, micro_batch=4, check=True)
    update._look_at_first(batch)
    assert update.guard.finding == "passed"
    assert torch.equal(batch[0], given)


def test_rows_that_a_collate_makes_anew_each_time_are_collated_once():
    noise = torch.Generator().manual_seed(0)

    def noisy(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack(samples) + torch.randn(len(samples), 6, generator=noise), torch.arange(len(samples)) % 3

    update = checked(nn.Linear(6, 3), list(torch.randn(12, 6)), micro_batch=Rows(4, collate=noisy))
    assert update.guard.finding == "passed"


def test_a_batch_of_tokens_is_compared_in_no_more_than_its_budget():
    seen = array("q")
    mask = torch.ones(24, 40, dtype=torch.long).tril(4)  # 5 to 28 tokens in rows of 40
    model = nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 2))

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch["input_ids"].numel())
        out = model(batch["input_ids"]) * batch["attention_mask"].unsqueeze(-1)
        return out.square().sum() / batch["attention_mask"].sum()

    objective = Objective(loss, lambda batch: batch["attention_mask"].sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    update = Update(model, optimizer, objective, micro_batch=Tokens(280), check=True)
    update._look_at_first({"input_ids": mask, "attention_mask": mask})
    assert update.guard.finding == "passed"
    assert max(seen) <= 280


def test_a_full_disk_leaves_it_unjudged(monkeypatch):
    def full(self: TensorFile, flat: torch.Tensor) -> tuple[int, int]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorFile, "write", full)
    model = nn.Linear(6, 3)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, micro_batch=4, check=True)
    update._look_at_first(labelled())
    assert update.guard.finding == "not judged"
    assert "No space left" in update.guard.reason


def test_gradients_aside_are_as_far_apart_as_those_in_memory():
    one = Gradient(0.0, {"large": torch.randn(300, 70), "small": torch.randn(5), "none": None, "gone": torch.ones(2)})
    other = Gradient(0.0, {"large": torch.randn(300, 70), "small": torch.randn(5), "none": torch.ones(3), "gone": None})
    aside = GradientAside(one, TensorFile())
    assert aside.norms == one.norms
    assert aside.distances(other) == pytest.approx(one.distances(other), rel=1e-12)
    whole = float((one.parameters["large"].double() - other.parameters["large"].double()).norm())
    assert aside.distances(other)["large"] == pytest.approx(whole, rel=1e-12)
    assert aside.distances(other)["none"] == pytest.approx(3**0.5)
    assert aside.distances(other)["gone"] == pytest.approx(2**0.5)


def test_attention_that_draws_inside_its_kernel_runs_again_by_kernels_that_show_it():
    @torch.library.custom_op(
        "anybatch_tests::hidden_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    def hidden(values: torch.Tensor) -> torch.Tensor:
        return values + torch.rand(())

    hidden.register_autograd(lambda ctx, grad: grad)
    flash = array("b")

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            is_flash = torch.backends.cuda.flash_sdp_enabled()
            flash.append(is_flash)
            return hidden(self.linear(inputs)) if is_flash else self.linear(inputs)

    update = checked(Attending(), labelled())
    assert update.guard.finding == "passed"
    assert list(flash[:4]) == [1, 0, 0, 0]  # in one go, again, and two parts


class OnlyCheckpointed(Rows):
    """Rows that run checkpointed, of which so many would fit without."""

    @property
    def choice(self) -> SimpleNamespace:
        return SimpleNamespace(plain_rows=self.size - 8)


@pytest.mark.parametrize(("size", "compared"), [(8, 0), (12, 3), (16, 6)])
def test_no_more_rows_are_compared_than_fit_without_checkpointing(size, compared):
    seen = array("q")

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        seen.append(len(batch[0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    update = Update(model, optimizer, Objective(loss), micro_batch=OnlyCheckpointed(size), check=True)
    update._look_at_first(labelled(48))
    assert max(seen, default=0) == compared
    assert update.guard.finding == ("passed" if compared else "not judged")
    assert ("without checkpointing" in update.guard.reason) == (not compared)
