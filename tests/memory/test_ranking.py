"""Ways that fit, by measured time: what is offered, what is refused and why, and that nothing of the model is left changed."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch import (
    Accumulator,
    Fit,
    MemoryLimitError,
    PlanError,
    Rows,
    Update,
    measure_peak,
    plan,
    supervised,
)
from anybatch.batches import MicroBatches
from anybatch.memory import metered
from anybatch.memory.predicting import RankedWay, recomputing_of
from anybatch.memory.ranking import WayContest, fastest_own_way
from anybatch.memory.ranking.pass_times import RealPasses
from anybatch.passes import Running
from anybatch.passes.timing import laps_of
from anybatch.stages import Resize
from anybatch.torch_inside import is_in_backward
from tests.reference import gradient, relative_error, whole_batch_gradient

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


class CountsCalls(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class WritesBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class DrawsInPython(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.random())


class Changeable(Block):
    """A block that computes something else when it runs again, and leaves no mark of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if is_in_backward() else x)


class ByHand(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


def hooked() -> nn.Module:
    model = Stack()
    model.blocks[1].up.register_forward_hook(lambda module, inputs, output: None)
    return model


def spectral() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm
    return Stack(lambda: nn.Sequential(layer(nn.Linear(WIDTH, WIDTH)), nn.Tanh()))


def batch_of(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plan_of(model: nn.Module, memory: int | str, **options: Any) -> Any:
    return plan(model, sgd(model), CLASSES, batch_of(), memory=memory, margin=0.0, checkpointing=False, **options)


@pytest.fixture(scope="module")
def loose() -> Any:
    return plan_of(Stack(), "1GiB")


@pytest.fixture(scope="module")
def room(loose: Any) -> int:
    """What updates of a `Stack` in plain micro-batches of 8 rows take."""
    return int(loose.peak(8))


def state_of(model: nn.Module) -> list[Any]:
    tables = [sorted(vars(module)) for module in model.modules()]
    hooks = [[len(value) for value in vars(module).values() if isinstance(value, dict)] for module in model.modules()]
    return [tables, hooks, [one.grad for one in model.parameters()], [module.training for module in model.modules()]]


# --- what is offered


def test_a_batch_that_fits_in_one_piece_leaves_nothing_to_choose(loose):
    assert (loose.ranking, loose.not_ranked, loose.fastest) == ((), (), None)


@pytest.fixture(scope="module")
def planned(room: int) -> Any:
    return plan_of(Stack(), room)


def test_checkpointing_lets_larger_micro_batches_in_and_ways_are_sorted_by_their_measured_time(planned):
    ways = {way.way: way for way in planned.ranking}
    plain, recomputed = ways["smaller micro-batches"], ways["checkpointing the 4 Block of blocks"]
    assert (plain.kind, recomputed.kind) == ("smaller", "checkpointing")
    assert recomputed.micro_batch >= 2 * plain.micro_batch
    assert all(way.peak <= planned.limit for way in planned.ranking)
    assert [way.seconds for way in planned.ranking] == sorted(way.seconds for way in planned.ranking)
    assert planned.fastest is planned.ranking[0]


def test_the_ranking_is_told_in_words_and_in_json(planned):
    way = planned.ranking[0]
    assert f"measured: {way.way}, {way.passes} x {way.micro_batch} rows (" in planned.describe()
    assert planned.as_dict()["ranking"][0]["seconds"] == way.seconds


def test_the_peak_of_the_checkpointed_way_is_what_a_checkpointed_update_takes(planned):
    recomputed = next(way for way in planned.ranking if way.kind == "checkpointing")
    model = Stack()
    update = Update(model, sgd(model), CLASSES, micro_batch=recomputed.micro_batch, check="off")
    update(batch_of())
    with recomputing_of(model).on():
        _, peak = measure_peak(update, batch_of())
    _, plain = measure_peak(update, batch_of())
    outside = planned.outside(recomputed.micro_batch)  # which the profiler does not see: a fourth of so small a model
    assert peak <= recomputed.peak <= 1.25 * peak
    assert recomputed.peak <= planned.limit < plain + outside


def test_measuring_leaves_nothing_behind_and_takes_no_more_than_the_memory(room, monkeypatch):
    model = Stack(partial(Block, dropout=0.1))
    before, weights = state_of(model), [one.detach().clone() for one in model.parameters()]
    draws, python = torch.get_rng_state(), random.getstate()
    standing = sum(one.nbytes for one in (*model.parameters(), *batch_of()))
    run, peaks = RealPasses._run, []

    def metered_run(self: RealPasses, *passes: Any) -> float:
        seen = metered(lambda: run(self, *passes))
        peaks.append(seen.peak(standing))
        return seen.result

    monkeypatch.setattr(RealPasses, "_run", metered_run)
    found = plan_of(model, room + room // 8)
    assert len(found.ranking) == 2
    assert room // 2 < max(peaks) <= found.limit
    assert state_of(model) == before
    assert all(map(torch.equal, model.parameters(), weights))
    assert torch.equal(torch.get_rng_state(), draws)
    assert random.getstate() == python


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (partial(Stack, lambda: Block(norm=nn.BatchNorm1d(WIDTH))), r"blocks\.0\.norm .* running statistics twice"),
        (hooked, r"blocks\.1\.up has hooks on its forward"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 4)), "no list of blocks"),
        (partial(Stack, WritesBuffer), r"in backward changes blocks\.0\.seen"),
        (partial(Stack, CountsCalls), r"in backward changes blocks\.0\.calls"),
        (partial(Stack, DrawsInPython), "in backward changes random"),
        (partial(Stack, Changeable), "its gradient is off by"),
        (spectral, r"in backward changes blocks\.\d"),
    ],
)
def test_what_would_notice_that_it_runs_twice_is_refused_and_left_as_it_was(build, why):
    model = build()
    before = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=why):
        passes = RealPasses((model, None, CLASSES), Running(), torch.device("cpu"))
        passes.check_same(recomputing_of(model).on, [batch_of(4), batch_of(4)], is_plain_possible=True)
    assert state_of(model) == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())


def test_a_plan_says_which_way_is_not_offered_and_why(room):
    found = plan_of(ByHand(), room)
    assert [way.way for way in found.ranking] == ["smaller micro-batches"]
    assert found.not_ranked == ("Checkpointing lets no larger micro-batch in.",)
    assert found.not_ranked[0] in found.describe()


def test_batch_norm_checkpointed_by_hand_counts_twice():
    """The mistake that is refused above."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    checkpoint(norm, batch_of()[0].requires_grad_(), use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked == 2


def watched() -> nn.Module:
    model = Stack()
    model.out.weight.register_hook(lambda gradient: None)
    return model


@pytest.mark.parametrize(
    ("model", "why"), [(lambda: Stack().to("meta"), "holds no numbers"), (watched, "has hooks on its parameters")]
)
def test_what_cannot_be_measured_is_ranked_by_work_and_says_so(model, why, room):
    found = plan_of(model(), room)
    assert [(way.seconds, round(way.work, 2)) for way in found.ranking] == [(None, 1.0), (None, 1.33)]
    assert found.fastest is None
    assert why in found.not_ranked[-1]


def test_where_the_weights_alone_are_more_than_the_memory_no_way_is_tried():
    found = plan_of(Stack().to("meta"), sum(one.nbytes for one in Stack().parameters()))
    assert found.ranking == ()
    assert found.not_ranked == ("No way that saves activations makes it fit: the rest is more than the memory.",)


# --- the same gradient


@pytest.mark.parametrize("build", [partial(Stack, partial(Block, dropout=0.3)), partial(Pairs, Pair, 2)])
def test_recomputed_blocks_leave_the_gradient_of_plain_ones_to_the_bit(build):
    model = build()
    found = {}
    for name, switch in (("plain", nullcontext), ("recomputed", recomputing_of(model).on)):
        torch.manual_seed(1)
        model.zero_grad()
        with switch():
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


def test_a_model_of_transformers_is_checkpointed_by_its_own_method_and_put_back():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2)).train()
    before = state_of(model)
    recomputing = recomputing_of(model)
    assert recomputing.blocks == "the 4 LlamaDecoderLayer of model.layers"
    tokens = torch.randint(0, 32, (4, 8))
    gradients = []
    for switch in (nullcontext, recomputing.on):
        model.zero_grad()
        with switch():
            assert model.is_gradient_checkpointing is (switch is not nullcontext)
            model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append(gradient(model.parameters()))
    model.zero_grad()
    assert torch.equal(*gradients)
    assert state_of(model) == before
    model.gradient_checkpointing_enable()
    with pytest.raises(PlanError, match="it is on already"):
        recomputing_of(model)


# --- Fit


@pytest.fixture
def slow_plain(monkeypatch):
    """Measured passes say that plain ones take a second, and others a millisecond."""
    monkeypatch.setattr(RealPasses, "seconds", lambda self, switch, micro_batch: float(switch is nullcontext) or 0.001)


def update_of(model: nn.Module, split: Any, **options: Any) -> Update:
    return Update(model, sgd(model), CLASSES, micro_batch=split, check="off", **options)


def test_fit_uses_checkpointing_while_a_batch_runs_and_learns_what_plain_micro_batches_learn(slow_plain, room):
    model, plain = Stack().double(), Stack().double()
    batches = [(batch_of(seed=seed)[0].double(), batch_of(seed=seed)[1]) for seed in range(4)]
    before = state_of(model)[:2]
    said: list[Any] = []
    update = update_of(model, Fit(2 * room, fastest=True, margin=0.0), observer=said.append)
    reference = update_of(plain, 8)
    fit = update.accumulator.split
    for batch in batches:
        update(batch)
        reference(batch)
    chosen = fit.choice
    assert chosen.way.kind == "checkpointing"
    assert chosen.size > 8
    assert "checkpointing the 4 Block of blocks, predicted to need" in chosen.describe()
    assert [event.split for event in said if isinstance(event, Resize)] == [
        "checkpointing the 4 Block of blocks is tried"
    ]
    assert state_of(model)[:2] == before
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    assert max(float((one - two).abs().max()) for one, two in pairs) < 1e-14
    wanted = whole_batch_gradient(model, CLASSES.loss, batches[0])
    model.zero_grad()
    update.accumulator.backward(batches[0])
    assert relative_error(model, wanted) < 1e-14


def test_what_fit_runs_checkpointed_stays_inside_the_memory_that_plain_passes_of_its_size_exceed(slow_plain, room):
    model = Stack()
    update = update_of(model, Fit(room, fastest=True, margin=0.0))
    for seed in range(3):
        update(batch_of(seed=seed))
    result, peak = measure_peak(update, batch_of())
    largest, found = -(-ROWS // result.micro_batches), update.accumulator.split.choice.plan
    assert largest > 16
    assert peak <= room
    _, plain = measure_peak(update_of(model, largest), batch_of())
    assert plain + found.outside(largest) > room


def test_checkpointing_is_used_where_nothing_else_fits_and_only_if_it_was_asked_for(loose):
    model, room = Stack(), loose.least_bytes - 1
    with pytest.raises(MemoryLimitError, match="a single row"):
        update_of(model, Fit(room, margin=0.0))(batch_of())
    update = update_of(model, Fit(room, fastest=True, margin=0.0))
    assert update(batch_of()).applied
    choice = update.accumulator.split.choice
    assert choice.way.kind == "checkpointing"
    assert choice.plain_rows == choice.plan.micro_batch == 0
    assert replace(choice, way=None).plain_rows is None


def test_fit_does_not_take_a_way_that_it_cannot_run(planned):
    """Saved tensors on the host are for the user to keep there."""
    offload = replace(planned.ranking[0], kind="offload", seconds=0.0)
    assert fastest_own_way(replace(planned, ranking=(offload, *planned.ranking))) is planned.ranking[0]
    assert fastest_own_way(replace(planned, ranking=(offload,))) is None


def contest(model: nn.Module) -> WayContest:
    sizes = {"micro_batch": 64, "passes": 2, "peak": 1}
    way = RankedWay(kind="checkpointing", way="checkpointing", **sizes, seconds=1.0, work=4 / 3)
    return WayContest(Rows(64), way, model, Rows(8))


@pytest.mark.parametrize("is_better", [True, False])
def test_checkpointing_stays_where_real_updates_are_faster_with_it_and_is_put_back_where_not(is_better):
    model, news = Stack(count=2), []
    split = contest(model)
    for _ in range(40):
        cut: MicroBatches = split.cut(batch_of())
        with split.watching():
            is_on = "forward" in vars(model.blocks[0])
        assert is_on is (split.way is not None)
        seconds = 1.0 if is_on is is_better else 2.0
        split.learn(cut, [seconds / len(cut)] * len(cut))
        news += split.news()
    assert is_on is is_better
    end = "checkpointing" if is_better else "no checkpointing"
    rates = (128.0, 64.0) if is_better else (64.0, 128.0)
    assert news == [
        "checkpointing is tried",
        f"no checkpointing is tried: checkpointing {rates[0]:.4g} rows/s",
        f"{end} from now on: checkpointing {rates[0]:.4g} rows/s, no checkpointing {rates[1]:.4g} rows/s",
    ]


def test_a_batch_that_is_not_timed_runs_the_way_of_its_split_too():
    """As an update does whose noise is measured."""
    model = Stack(count=2)
    split = contest(model)
    cut = split.cut(batch_of())
    with laps_of(split, batch_of(), cut, None, is_timed=False).watched():
        assert "forward" in vars(model.blocks[0])
    with laps_of(Rows(8), batch_of(), cut, None, is_timed=False).watched():
        assert "forward" not in vars(model.blocks[0])
