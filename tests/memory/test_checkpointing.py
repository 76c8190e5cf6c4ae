"""Gradient checkpointing in plans: what is offered, what is refused and why, and that the model is left as it was."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import Accumulator, PlanError, Update, measure_peak, plan, supervised
from anybatch.memory.checkpointing import recompute_blocks
from tests.reference import gradient, relative_error

CLASSES = supervised(nn.CrossEntropyLoss())
WIDTH, ROWS = 16, 128


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm is None else norm
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks in a list that forward walks through, as most models have them."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.out = nn.Linear(WIDTH, 4)
        self.register_buffer("scale", torch.ones(()))  # no forward writes to it, and nobody may be told so

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float) -> tuple[Tensor, Tensor]:
        return self.left(pair[0]) * scale, self.right(pair[1]) + pair[0]


class Pairs(Stack):
    def forward(self, x: Tensor) -> Tensor:
        pair = x, x
        for block in self.blocks:
            pair = block(pair, scale=0.9)
        return self.out(pair[0] + pair[1])


def hooked() -> nn.Module:
    model = Stack()
    model.blocks[1].up.register_forward_hook(lambda module, inputs, output: None)
    return model


def batch_of(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def state_of(model: nn.Module) -> list[Any]:
    tables = [sorted(vars(module)) for module in model.modules()]
    hooks = [[len(value) for value in vars(module).values() if isinstance(value, dict)] for module in model.modules()]
    return [tables, hooks, [one.grad for one in model.parameters()], [module.training for module in model.modules()]]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (partial(Stack, lambda: Block(norm=nn.BatchNorm1d(WIDTH))), r"blocks\.0\.norm .* running statistics twice"),
        (hooked, r"blocks\.1\.up has hooks on its forward"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 4)), "no list of blocks"),
    ],
)
def test_what_would_notice_that_it_runs_twice_is_refused_and_left_as_it_was(build, why):
    model = build()
    before = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=why):
        recompute_blocks(model)
    assert state_of(model) == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())


def test_batch_norm_checkpointed_by_hand_counts_twice():
    """The mistake that is refused above."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    checkpoint(norm, batch_of()[0].requires_grad_(), use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked == 2


@pytest.mark.parametrize("build", [partial(Stack, partial(Block, dropout=0.3)), partial(Pairs, Pair, 2)])
def test_recomputed_blocks_leave_the_gradient_of_plain_ones_to_the_bit(build):
    plain, recomputed = build(), build()
    recompute_blocks(recomputed)
    found = {}
    for name, model in (("plain", plain), ("recomputed", recomputed)):
        torch.manual_seed(1)
        Accumulator(model, CLASSES, micro_batch=48).backward(batch_of())
        found[name] = gradient(model.parameters()), torch.get_rng_state()
    assert torch.equal(found["plain"][0], found["recomputed"][0])
    assert torch.equal(found["plain"][1], found["recomputed"][1])


def test_blocks_that_draw_other_masks_in_backward_do_not():
    model = Stack(partial(Block, dropout=0.3))
    torch.manual_seed(1)
    Accumulator(model, CLASSES, micro_batch=48).backward(batch_of())
    plain = gradient(model.parameters())
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    torch.manual_seed(1)
    model.zero_grad()
    Accumulator(model, CLASSES, micro_batch=48).backward(batch_of())
    assert relative_error(model, plain) > 0.1


def test_a_model_of_transformers_is_checkpointed_by_its_own_method():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2)).train()
    copied = copy.deepcopy(model)
    assert recompute_blocks(copied) == "the 4 LlamaDecoderLayer of model.layers"
    tokens = torch.randint(0, 32, (4, 8))
    gradients = []
    for one in (model, copied):
        assert one.is_gradient_checkpointing is (one is copied)
        one(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append(gradient(one.parameters()))
    assert torch.equal(*gradients)
    with pytest.raises(PlanError, match="it is on already"):
        recompute_blocks(copied)


def test_a_plan_says_what_checkpointing_saves_and_the_model_is_left_as_it_was():
    model, batch = Stack(), batch_of(2048)
    before = state_of(model)
    planned = plan(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, batch, memory="1GiB")
    found = planned.checkpointing
    assert found.blocks == "the 4 Block of blocks"
    assert found.saved > 0
    assert "Checkpointing the 4 Block of blocks would save" in planned.describe()
    assert state_of(model) == before
    recompute_blocks(model)
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, micro_batch=2048, check="off")
    update(batch)
    taken = measure_peak(update, batch)[1]
    assert found.peak - planned.outside(2048) == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize("build", [hooked, lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 4))])
def test_a_plan_of_a_model_that_cannot_be_checkpointed_does_not_speak_of_it(build):
    model = build()
    planned = plan(model, torch.optim.SGD(model.parameters(), lr=0.1), CLASSES, batch_of(), memory="1GiB")
    assert planned.checkpointing is None
    assert "heckpointing" not in planned.describe()


def test_what_was_for_timing_ways_is_ignored_with_a_deprecation_warning():
    model = Stack()
    options = {"memory": "1GiB", "checkpointing": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(DeprecationWarning, match=r"plan\(ranking=False\) is deprecated and ignored: ways are no longer"):
        asked = plan(model, optimizer, CLASSES, batch_of(), ranking=False, **options)
    assert asked.as_dict() == plan(model, optimizer, CLASSES, batch_of(), **options).as_dict()
