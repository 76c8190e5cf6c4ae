"""Buffers that step in a forward: spectral norm and InstanceNorm step once per batch, and the rest is told."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Accumulator, Coupled, Objective, Update, UpdateError, info_nce, supervised
from anybatch.errors import first_line
from tests.reference import gradient, relative_error
from tests.setups import cross_entropy, labelled

rows = partial(labelled, 14, seed=1)

SPECTRAL = {"parametrization": nn.utils.parametrizations.spectral_norm, "hook": nn.utils.spectral_norm}


class Discriminator(nn.Module):
    """One weight under spectral norm that is used twice in a forward; InstanceNorm, and BatchNorm where asked."""

    def __init__(self, form: str, *, has_batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = SPECTRAL[form](nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6) if has_batch_norm else nn.Identity()
        self.channels = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.head = SPECTRAL[form](nn.Linear(6, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.norm(self.first(x).tanh()))
        return self.head(self.channels(y.reshape(-1, 2, 3)).reshape(-1, 6))


OBJECTIVE = supervised(nn.CrossEntropyLoss())


def at_once(model: nn.Module, batch: Any, loss: Any = cross_entropy) -> nn.Module:
    twin = copy.deepcopy(model)
    loss(twin, batch).backward()
    return twin


def buffers_apart(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.buffers(), other.buffers(), strict=True)
    return max(float((mine.double() - its.double()).abs().max()) for mine, its in pairs)


def differs(model: nn.Module, other: nn.Module) -> float:
    return relative_error(model, gradient(other.parameters()))


@pytest.mark.parametrize("form", SPECTRAL)
@pytest.mark.parametrize("has_batch_norm", [False, True], ids=["one by one", "in lockstep"])
def test_spectral_norm_and_instance_norm_advance_once_per_batch_over_several_batches(form, has_batch_norm):
    model = Discriminator(form, has_batch_norm=has_batch_norm)
    wanted = copy.deepcopy(model)
    accumulator = Accumulator(model, OBJECTIVE, micro_batch=4, batch_norm="exact")
    for count in (14, 9, 5):
        for each in (model, wanted):
            each.zero_grad()
        cross_entropy(wanted, labelled(count, seed=1)).backward()
        accumulator.backward(labelled(count, seed=1))
        assert differs(model, wanted) <= 1e-12
        assert buffers_apart(model, wanted) <= 1e-12


@pytest.mark.parametrize("form", SPECTRAL)
def test_accumulated_the_usual_way_they_do_not(form):
    model = Discriminator(form)
    wanted = at_once(model, rows())
    for part in zip(*(column.split(4) for column in rows()), strict=True):
        (cross_entropy(model, part) * len(part[1]) / 14).backward()
    assert differs(model, wanted) > 1e-3
    assert buffers_apart(model, wanted) > 0.01


@pytest.mark.parametrize("form", SPECTRAL)
def test_a_coupled_loss_steps_them_once_too(form):
    coupled = Coupled(lambda model, x: (model(x), model(x + 1)), info_nce(0.5))
    model = Discriminator(form)
    wanted = at_once(model, rows()[0], coupled.whole().loss)
    Accumulator(model, coupled, micro_batch=4).backward(rows()[0])
    assert differs(model, wanted) <= 1e-12
    assert buffers_apart(model, wanted) <= 1e-12


def test_spectral_norm_in_a_compiled_model_steps_once():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)).double()
    wanted = at_once(model, rows())
    Accumulator(torch.compile(model, backend="eager"), OBJECTIVE, micro_batch=4).backward(rows())
    assert differs(model, wanted) <= 1e-12
    assert buffers_apart(model, wanted) <= 1e-12


def test_frozen_batch_norm_leaves_instance_norm_to_step():
    model = Discriminator("hook", has_batch_norm=True)
    wanted = copy.deepcopy(model)
    wanted.norm.eval()
    cross_entropy(wanted, rows()).backward()
    Accumulator(model, OBJECTIVE, micro_batch=4, batch_norm="frozen").backward(rows())
    assert differs(model, wanted) <= 1e-12
    assert buffers_apart(model, wanted) <= 1e-12


class Codebook(nn.Module):
    """Subtracts a moving average of what it has seen, as a VQ codebook or ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3).double()
        self.register_buffer("codes", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) - self.codes
        self.codes.lerp_(y.detach().mean(0), 0.5)
        return y * self.table


def test_any_other_buffer_that_moves_is_told_once_by_name_and_with_its_effect():
    accumulator = Accumulator(nn.Sequential(Codebook()), OBJECTIVE, micro_batch=4)
    with pytest.warns(
        UserWarning, match=r"changes buffers of its own \(0\.codes\): 4 times.*by [0-9.e-]+ of itself"
    ) as told:
        accumulator.backward(rows())
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulator.backward(rows())


def test_nothing_is_told_of_one_micro_batch_nor_of_buffers_that_rest():
    Accumulator(Codebook(), OBJECTIVE, micro_batch=14).backward(rows())
    Accumulator(Codebook().eval().inner, OBJECTIVE, micro_batch=4).backward(rows())


@pytest.mark.filterwarnings("ignore:the forward changes buffers of its own")
def test_a_skipped_update_puts_every_buffer_back():
    model = nn.Sequential(Discriminator("hook"), nn.Linear(3, 6).double(), Codebook())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), OBJECTIVE, micro_batch=4, on_nonfinite="skip")
    for _ in range(2):  # copies of the first batch, and later ones
        before = [buffer.clone() for buffer in model.buffers()]
        x, y = rows()
        x[5] = torch.nan
        assert not update((x, y)).applied
        assert all(map(torch.equal, before, model.buffers()))
        assert update(rows()).applied
        assert not all(map(torch.equal, before, model.buffers()))


def test_a_batch_norm_that_is_put_in_later_is_seen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 3)).double()
    accumulator = Accumulator(model, OBJECTIVE, micro_batch=4, batch_norm="exact")
    accumulator.backward(rows())
    model[1] = nn.BatchNorm1d(6, track_running_stats=False).double()
    model.zero_grad()
    wanted = at_once(model, rows())
    accumulator.backward(rows())
    assert differs(model, wanted) <= 1e-12
    plain = copy.deepcopy(model)
    plain.zero_grad()
    for part in zip(*(column.split(4) for column in rows()), strict=True):
        (cross_entropy(plain, part) * len(part[1]) / 14).backward()
    assert differs(plain, wanted) > 0.1


class Checkpointed(nn.Module):
    def __init__(self, *, is_reentrant: bool, is_inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.is_reentrant, self.is_inside = is_reentrant, is_inside
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        repeated = nn.Sequential(self.block, self.norm) if self.is_inside else self.block
        y = checkpoint(repeated, x.requires_grad_(), use_reentrant=self.is_reentrant)
        return self.head(y if self.is_inside else self.norm(y))


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_exact_batch_norm_inside_a_checkpointed_block_is_refused_by_name_and_nothing_changes(is_reentrant):
    model = Checkpointed(is_reentrant=is_reentrant, is_inside=True)
    before = [buffer.clone() for buffer in model.buffers()]
    with pytest.raises(UpdateError, match=r"'norm' is inside a block under checkpointing.*between the BatchNorms"):
        Accumulator(model, OBJECTIVE, micro_batch=4, batch_norm="exact").backward(rows())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.buffers()))


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_beside_one_it_is_exact(is_reentrant):
    model = Checkpointed(is_reentrant=is_reentrant, is_inside=False)
    wanted = at_once(model, rows())
    Accumulator(model, OBJECTIVE, micro_batch=4, batch_norm="exact").backward(rows())
    assert differs(model, wanted) <= 1e-12


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint of the user's own, which torch's file knows nothing of."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), grad)
        return None, x.grad


def test_a_block_that_backward_computes_again_in_any_other_way_is_refused_too():
    model = Checkpointed(is_reentrant=True, is_inside=True)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen = OwnCheckpoint.apply(nn.Sequential(model.block, model.norm), batch[0].requires_grad_())
        return F.cross_entropy(model.head(seen), batch[1])

    with pytest.raises(UpdateError) as refused:
        Accumulator(model, Objective(loss), micro_batch=4, batch_norm="exact").backward(rows())
    assert "'norm' is inside a block under checkpointing" in first_line(refused.value)
