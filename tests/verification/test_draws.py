"""Random draws are the rows': whatever the cut, a row draws what it drew in the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Coupled, Objective, info_nce, supervised, verify
from anybatch.verification.draws import Draws, recording, replaying, rows_of_draw
from tests.verification.sound import ROWS, both, rows_of_numbers, towers

ORDER = [4, 0, 2]


def drawn(draw, rows):
    """What `draw(rows)` gives for the whole batch, and for some rows when it is replayed."""
    draws = Draws(6)
    with recording(draws):
        whole = draw(6)
    with replaying(draws, rows):
        part = draw(len(rows))
    assert not draws.strange
    return whole, part


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: F.dropout(torch.ones(n, 50), 0.5),
        lambda n: F.dropout(torch.ones(n * 4, 50), 0.5).reshape(n, -1),
        lambda n: F.dropout(torch.ones(5, n, 20), 0.5).transpose(0, 1),
        lambda n: nn.Dropout2d(0.5)(torch.ones(n, 30, 2, 2)),
        lambda n: F.alpha_dropout(torch.ones(n, 50), 0.5, training=True),
        lambda n: torch.randn(n, 3),
        lambda n: torch.rand_like(torch.ones(n, 3)),
        lambda n: torch.randint(0, 1000, (n, 3)),
        lambda n: torch.empty(n, 3).normal_(),
        lambda n: torch.bernoulli(torch.full((n, 40), 0.5)),
        lambda n: torch.multinomial(torch.ones(n, 40), 5),
        lambda n: F.gumbel_softmax(torch.zeros(n, 8)),
        lambda n: F.scaled_dot_product_attention(*[torch.ones(n, 2, 7, 4)] * 3, dropout_p=0.5),
        lambda n: torch.ops.aten.native_dropout(torch.ones(n, 50), 0.5, True)[0],
    ],
)
def test_rows_draw_again_what_they_drew(draw):
    whole, part = drawn(draw, ORDER)
    assert torch.equal(part, whole[ORDER])
    assert not torch.equal(draw(6), whole)  # without replaying they do not


def test_padding_that_is_cut_off_takes_its_draws_with_it():
    whole = torch.arange(6 * 10 * 4).reshape(6, 10, 4)
    draws = Draws(6)
    assert torch.equal(rows_of_draw(whole, (3, 7, 4), ORDER, draws), whole[ORDER, :7])
    flat = rows_of_draw(whole.flatten(0, 1), (3 * 7, 4), ORDER, draws)
    assert torch.equal(flat, whole[ORDER, :7].flatten(0, 1))
    assert torch.equal(rows_of_draw(whole, (3, 7, 4), ORDER, Draws(6, is_left=True)), whole[ORDER, 3:])


def test_a_draw_of_no_rows_is_everybodys_and_one_of_strange_shape_nobodys():
    draws = Draws(6)
    shared = torch.randn(8)
    assert torch.equal(rows_of_draw(shared, (8,), ORDER, draws), shared)
    assert rows_of_draw(torch.randn(61), (13,), ORDER, draws) is None
    assert rows_of_draw(torch.randn(6, 2), (3,), ORDER, draws) is None


class Checkpointed(nn.Module):
    """Dropout inside blocks whose forward runs again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 8)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(self.use_reentrant)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_in_checkpointed_blocks_is_exact(use_reentrant):
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant)
    verdict = verify(model, supervised(nn.CrossEntropyLoss()), rows_of_numbers())
    assert verdict.is_exact, verdict.describe()
    encode = lambda model, x: (model(x), model(x.flip(1)))  # noqa: E731
    verdict = verify(model, Coupled(encode, info_nce()), torch.randn(ROWS, 6))
    assert verdict.is_exact, verdict.describe()


class NoisyLoss(nn.Module):
    """A coupled loss that drops out itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = info_nce()

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.inner((F.dropout(pair[0], 0.3), pair[1]))


def test_dropout_inside_a_coupled_loss_is_held_too():
    torch.manual_seed(0)
    pairs = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
    verdict = verify(towers(), Coupled(both, NoisyLoss()), pairs)
    assert verdict.is_exact, verdict.describe()


def test_without_replaying_dropout_is_far_from_exact():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)), rows_of_numbers()

    def loss() -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    grads = [torch.autograd.grad(loss(), model[0].weight)[0] for _ in range(2)]
    assert (grads[0] - grads[1]).norm() > 0.1 * grads[0].norm()
    assert verify(model, Objective(lambda model, b: F.cross_entropy(model(b[0]), b[1])), batch).is_exact
