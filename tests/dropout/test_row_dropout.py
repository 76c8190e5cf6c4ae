"""Dropout keyed by row: the same masks whatever the cut, the ranks, a retry, a second forward or a resume."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from anybatch import (
    Accumulator,
    Coupled,
    Dealt,
    DropoutError,
    MicroBatches,
    NonFiniteError,
    Objective,
    Tokens,
    Update,
    resume,
    row_dropout,
    save,
    supervised,
    take_rows,
)
from anybatch.core.snapshot import RandomState
from anybatch.dropout import keep_mask, key_of, masks_of
from tests.reference import relative_error

WORD = 2**32 - 1


def slow_mask(key, row, place, keep):
    """One entry of a mask, by whole numbers of Python."""

    def split(number, key):
        word = (number * 0x9E3779B97F4A7C15 + key) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word >> 32

    bits = split(row, key_of(key, 0)) + sum(split(at, key_of(dim)) for dim, at in enumerate(place)) & WORD
    bits ^= bits >> 16
    bits = (bits * 0x7FEB352D & WORD) ^ split(row, key_of(key, 1))
    bits ^= bits >> 15
    bits = bits * 0x846CA68B & WORD
    bits ^= bits >> 16
    signed = bits - 2**32 if bits >= 2**31 else bits
    return signed < round(keep * 2**32) - 2**31


def test_the_fast_mask_is_the_slow_one():
    mask = keep_mask(99, torch.tensor([5, 0, 70_000]), (4, 3), 0.7)
    for index, row in enumerate((5, 0, 70_000)):
        for place in ((0, 0), (3, 2), (2, 1), (1, 0)):
            assert mask[(index, *place)].item() == slow_mask(99, row, place, 0.7)


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.999])
def test_the_keep_rate_is_right_over_all_and_in_every_row_and_place(keep):
    mask = keep_mask(key_of(1, 2), torch.arange(256), (16, 64), keep).double()
    deviation = math.sqrt(keep * (1 - keep))
    assert abs(mask.mean() - keep) < 4 * deviation / math.sqrt(mask.numel())
    for dims in ((1, 2), (0,)):
        rates = mask.mean(dim=dims).flatten()
        counted = mask.numel() / rates.numel()
        squares = ((rates - keep) / (deviation / math.sqrt(counted))).square().sum().item()
        assert abs(squares - rates.numel()) < 5 * math.sqrt(2 * rates.numel())  # chi-square


def correlation(one, other):
    one, other = one.double().flatten(), other.double().flatten()
    return abs(torch.corrcoef(torch.stack([one, other]))[0, 1].item()) * math.sqrt(one.numel())


def test_masks_of_other_seeds_updates_layers_calls_rows_and_places_are_independent():
    rows, (upper, lower) = torch.arange(64), torch.triu_indices(32, 32, offset=1)
    keys = [(0, 1, 0, 0), (1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (1, 0, 0, 0)]
    masks = [keep_mask(key_of(*key), rows, (32, 32), 0.8) for key in keys]
    deviations = [correlation(one, other) for i, one in enumerate(masks) for other in masks[:i]]
    for mask in masks:
        deviations += [correlation(mask[:-shift], mask[shift:]) for shift in (1, 2, 32)]
        deviations += [correlation(mask[:, :-shift], mask[:, shift:]) for shift in (1, 2, 16)]
        deviations += [correlation(mask[..., :-shift], mask[..., shift:]) for shift in (1, 2, 16)]
        deviations.append(correlation(mask[:, upper, lower], mask[:, lower, upper]))
    assert max(deviations) < 4.2  # of some 80 standard normal numbers
    assert sum(one**2 for one in deviations) < len(deviations) + 5 * math.sqrt(2 * len(deviations))


def test_whole_words_of_the_mask_fall_evenly():
    bits = keep_mask(3, torch.arange(4096), (8, 8), 0.5).reshape(-1, 8).long()
    words = (bits * 2 ** torch.arange(8)).sum(1)
    counts = torch.bincount(words, minlength=256).double()
    expected = words.numel() / 256
    assert abs(((counts - expected).square() / expected).sum() - 255) < 5 * math.sqrt(2 * 255)


class Attention(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.drop_weights, self.drop_mixed = nn.Dropout(p), nn.Dropout(p)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        query, key, value = self.attend(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        x = x + self.drop_weights(scores.masked_fill(hidden, -torch.inf).softmax(-1)) @ value
        return x + self.drop_mixed(self.mix(x))


class SmallGPT(nn.Module):
    """Predicts the next of 11 tokens; dropout on embeddings, attention weights and features."""

    def __init__(self, p=0.1, width=16, is_checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop = nn.Embedding(11, width), nn.Dropout(p)
        self.block, self.head = Attention(width, p), nn.Linear(width, 11)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens):
        x = self.drop(self.embed(tokens))
        x = (
            checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
            if self.is_checkpointed
            else self.block(x)
        )
        return self.head(x)


def next_token(model, batch):
    logits = model(batch["input_ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def num_targets(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


GPT = Objective(next_token, num_targets)


def batches(count, rows=16, length=9):
    """Ragged batches, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens = torch.randint(0, 11, (rows, length), generator=generator)
        lengths = torch.randint(3, length + 1, (rows, 1), generator=generator)
        is_there = torch.arange(length) < lengths
        labels = tokens.where(is_there, -100)
        yield {"input_ids": tokens.where(is_there, 0), "labels": labels, "attention_mask": is_there.long()}


def flat(model):
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def trained(micro_batch, swap=True, count=50, **options):
    model = SmallGPT(**options)
    model = row_dropout(model) if swap else model
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.3), GPT, micro_batch=micro_batch)
    torch.manual_seed(2)
    for batch in batches(count):
        update(batch)
    return flat(model)


def off(one, other):
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def whole():
    return trained(16)


@pytest.mark.parametrize("micro_batch", [4, 1, Tokens(40)], ids=str)
def test_weights_after_50_updates_are_the_same_whatever_the_cut(whole, micro_batch):
    assert off(trained(micro_batch), whole) < 2e-6


def test_with_stock_dropout_they_are_not():
    assert off(trained(4, swap=False), trained(16, swap=False)) > 5e-3


def test_a_checkpointed_block_runs_again_with_the_same_masks(whole):
    assert off(trained(4, is_checkpointed=True, count=50), whole) < 2e-6


def test_a_batch_that_runs_out_of_memory_starts_again_with_the_same_masks(whole):
    model = row_dropout(SmallGPT())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.3), GPT, micro_batch=8)
    forwards = 0

    def run_out(*_):
        nonlocal forwards
        forwards += 1
        if forwards in (4, 9):  # in mid-batch, twice
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.head.register_forward_pre_hook(run_out)
    retries = sum(update(batch).retries for batch in batches(50))
    assert retries == 2
    assert off(flat(model), whole) < 2e-6


def test_dropout_drops(whole):
    assert off(trained(16, p=0.0), whole) > 1e-2


def test_masks_change_from_update_to_update_and_go_on_where_a_checkpoint_was_saved(tmp_path):
    def begin():
        model = row_dropout(SmallGPT())
        return Update(model, torch.optim.SGD(model.parameters(), lr=0.3), GPT, micro_batch=8)

    straight, first, second = begin(), begin(), begin()
    some = list(batches(6))
    for number, batch in enumerate(some):
        straight(batch)
        if number < 3:
            first(batch)
    save(tmp_path, first, number=3)
    resume(tmp_path, second)
    for batch in some[3:]:
        second(batch)
    assert torch.equal(flat(second.model), flat(straight.model))
    forgetful = begin()
    resume(tmp_path, forgetful)
    forgetful.model.drop.masks.update = 0
    for batch in some[3:]:
        forgetful(batch)
    assert off(flat(forgetful.model), flat(straight.model)) > 1e-4


def gradient_of(model, objective, batch, micro_batch, **options):
    model.zero_grad()
    Accumulator(model, objective, micro_batch=micro_batch, **options).backward(batch)
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def test_rows_dealt_to_ranks_and_cut_by_them_drop_as_in_the_whole_batch():
    batch = next(batches(1))
    reference = gradient_of(row_dropout(SmallGPT()), GPT, batch, 32)
    parts = [[*range(0, 16, 3)], [*range(1, 16, 3)], [*range(2, 16, 3)]]
    total, wrong = 0, 0
    for rows in parts:
        mine = take_rows(batch, rows)
        share = num_targets(mine) / num_targets(batch)
        total += share * gradient_of(row_dropout(SmallGPT()), GPT, Dealt(mine, tuple(rows), 16), 5)
        wrong += share * gradient_of(row_dropout(SmallGPT()), GPT, mine, 5)
    assert off(total, reference) < 1e-6
    assert off(wrong, reference) > 1e-2


def test_a_coupled_loss_needs_no_random_state_to_be_replayed(monkeypatch):
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    torch.manual_seed(0)
    batch = (torch.randn(24, 6), torch.randn(24, 6))
    objective = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), lambda pair: (pair[0] @ pair[1].T).var())

    def error(swap):
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 4)).double()
        model = swap(model)
        pair = tuple(part.double() for part in batch)
        reference = gradient_of(copy.deepcopy(model), objective, pair, 24)
        return off(gradient_of(model, objective, pair, 5), reference)

    assert error(row_dropout) < 1e-13
    assert error(lambda model: model) > 1e-2


def test_exact_batch_norm_in_lockstep_keeps_the_masks():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2)
    ).double()
    model, objective = row_dropout(net), supervised(nn.CrossEntropyLoss())
    batch = (torch.randn(24, 6).double(), torch.randint(0, 2, (24,)))
    reference = gradient_of(copy.deepcopy(model), objective, batch, 24)
    assert off(gradient_of(model, objective, batch, 5, batch_norm="exact"), reference) < 1e-12


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, where a graph ends
def test_a_compiled_model_keeps_the_masks():
    batch = next(batches(1))
    model = row_dropout(SmallGPT())
    twin = torch.compile(copy.deepcopy(model), backend="eager")
    for _ in range(2):
        reference = gradient_of(model, GPT, batch, 16)
        assert off(gradient_of(twin, GPT, batch, 5), reference) < 1e-6


def test_micro_batches_that_come_cut_are_numbered_in_order():
    batch = next(batches(1))
    reference = gradient_of(row_dropout(SmallGPT()), GPT, batch, 32)
    parts = MicroBatches([take_rows(batch, slice(start, stop)) for start, stop in pairwise([0, 3, 10, 16])])
    assert off(gradient_of(row_dropout(SmallGPT()), GPT, parts, 32), reference) < 1e-6


class Recording(nn.Module):
    """Passes its input through one layer and keeps what came out."""

    def __init__(self, layer, shape):
        super().__init__()
        self.weight, self.layer, self.shape, self.seen = nn.Parameter(torch.ones(())), layer, shape, []

    def forward(self, x):
        for _ in range(2):
            self.seen.append(self.layer(self.shape(x)).detach().reshape(x.shape))
        return x.mean() * self.weight


def seen_by(layer, shape=lambda x: x, x=None, micro_batch=4):
    model = row_dropout(Recording(layer, shape)).train()
    x = torch.ones(8, 4, 6) if x is None else x
    Accumulator(model, Objective(lambda model, x: model(x)), micro_batch=micro_batch).backward(x)
    return torch.cat(model.seen[::2]), torch.cat(model.seen[1::2])


def test_a_layer_called_twice_draws_twice_and_rows_may_be_flattened_with_what_follows():
    first, second = seen_by(nn.Dropout(0.5))
    assert not torch.equal(first, second)
    flattened = [seen_by(nn.Dropout(0.5), lambda x: x.flatten(0, 1), micro_batch=size)[0] for size in (8, 2)]
    assert torch.equal(*flattened)


@pytest.mark.parametrize("layer", [nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.5)])
def test_channels_are_dropped_whole(layer):
    out, _ = seen_by(layer)
    assert out.unique().numel() == 2
    assert torch.equal(out, out[..., :1].expand_as(out))


def test_alpha_dropout_keeps_mean_and_variance_and_plain_dropout_the_mean():
    torch.manual_seed(0)
    x = torch.randn(64, 4, 500)
    out, _ = seen_by(nn.AlphaDropout(0.3), x=x, micro_batch=16)
    assert abs(out.mean()) < 0.02
    assert abs(out.var() - 1) < 0.02
    out, _ = seen_by(nn.Dropout(0.3), x=x + 1, micro_batch=16)
    assert abs(out.mean() - 1) < 0.02


def test_in_evaluation_and_at_p_0_it_passes_and_at_p_1_nothing_does():
    x = torch.randn(8, 4, 6)
    assert torch.equal(row_dropout(nn.Sequential(nn.Dropout(0.5))).eval()(x), x)
    assert torch.equal(seen_by(nn.Dropout(0.0), x=x)[0], x)
    assert seen_by(nn.Dropout(1.0), x=x)[0].abs().max() == 0


def test_a_copy_of_the_model_counts_for_itself():
    model = row_dropout(SmallGPT())
    twin = copy.deepcopy(model)
    batch = next(batches(1))
    first = gradient_of(model, GPT, batch, 32)
    second = gradient_of(model, GPT, batch, 32)
    assert torch.equal(gradient_of(twin, GPT, batch, 32), first)
    assert off(second, first) > 1e-2
    assert {layer.masks.update for layer in (twin.drop, twin.block.drop_mixed)} == {1}


def test_outside_an_update_the_rows_have_no_numbers():
    model = row_dropout(SmallGPT())
    with pytest.raises(DropoutError, match=r"drop ran in training outside an update.*Give the batch to Update"):
        model(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            nn.LSTM(3, 3, num_layers=2, dropout=0.1),
            r"0 \(LSTM\) draws its own masks between layers. Use dropout=0 and 2",
        ),
        (nn.MultiheadAttention(4, 2, dropout=0.1), r"0 \(MultiheadAttention\) draws its own.*Set its .dropout = 0.0"),
        (
            nn.TransformerEncoderLayer(4, 2, dropout=0.0),
            r"\(TransformerEncoderLayer\) takes time first.*batch_first=True",
        ),
        (row_dropout(nn.Sequential(nn.Dropout(0.1))), r"0.0 \(RowDropout\) was swapped already"),
    ],
    ids=["lstm", "attention", "time first", "twice"],
)
def test_layers_that_draw_their_own_masks_are_refused_by_name(layer, message):
    with pytest.raises(DropoutError, match=message):
        row_dropout(nn.Sequential(layer, nn.Dropout(0.1)))


def test_a_model_without_dropout_is_told_so():
    with pytest.raises(DropoutError, match="this Linear has no dropout layer"):
        row_dropout(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("dropout", lambda x: F.dropout(x, 0.1)),
        ("scaled_dot_product_attention", lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
        ("rand", lambda x: x + torch.rand(())),
    ],
)
def test_a_function_that_draws_for_itself_is_named_with_its_line_unless_it_is_allowed(name, draw):
    class Drawing(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

        def forward(self, x):
            return draw(self.drop(self.line(x)))

    objective = Objective(lambda model, x: model(x).square().mean())
    batch = torch.randn(6, 3, 4)
    place = rf"\({name} in <lambda>, test_row_dropout.py:\d+\)"
    with pytest.raises(DropoutError, match=rf"drew random numbers beside .* {place}.*strict=False"):
        Accumulator(row_dropout(Drawing()), objective, micro_batch=2).backward(batch)
    Accumulator(row_dropout(Drawing(), strict=False), objective, micro_batch=2).backward(batch)


def test_a_shape_without_rows_first_names_the_layer_and_the_shape():
    with pytest.raises(
        DropoutError, match=r"layer was given shape \(6, 4, 3\) in a micro-batch of 4 rows.*batch_first=True"
    ):
        seen_by(nn.Dropout(0.5), lambda x: x.flatten(1).reshape(6, 4, -1)[:, :, :3], x=torch.ones(4, 4, 6))


def test_a_layer_called_twice_under_checkpointing_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

        def forward(self, x):
            return checkpoint(lambda x: self.drop(self.line(self.drop(x))), x, use_reentrant=False)

    accumulator = Accumulator(row_dropout(Twice()), Objective(lambda model, x: model(x).square().mean()), micro_batch=2)
    with pytest.raises(DropoutError, match=r"drop runs again inside backward .*called more than once"):
        accumulator.backward(torch.randn(4, 4))


def test_the_gradient_is_that_of_the_masked_whole_batch_in_float64():
    model = row_dropout(SmallGPT())
    batch = next(batches(1))
    accumulator = Accumulator(model, GPT, micro_batch=Tokens(40))
    accumulator.backward(batch)
    twin = copy.deepcopy(model).double()
    twin.zero_grad()
    with twin.drop.masks.at(tuple(range(16)), set()):
        next_token(twin, batch).backward()
    reference = torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
    assert relative_error(model, reference) < 5e-7


def learnt(spoil, **options):
    """The weights after three batches, of which the second is given twice because `spoil` made its first time fail."""
    model = row_dropout(SmallGPT())
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.3), GPT, micro_batch=4, **options)
    first, second, third = batches(3)
    update(first)
    spoil(update, second)
    for batch in (second, third):
        assert update(batch).applied
    return flat(model)


def nothing(update, batch):
    pass


def interrupted(update, batch):
    handle = update.model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        update(batch)
    handle.remove()


def refused_before_it_began(update, batch):
    update.observer = lambda event: (_ for _ in ()).throw(RuntimeError("no zeroing"))
    with pytest.raises(RuntimeError, match="no zeroing"):
        update(batch)
    update.observer = None


def not_finite(update, batch):
    handle = update.model.head.register_forward_hook(lambda layer, given, output: output * torch.nan)
    if update.on_nonfinite == "skip":
        assert not update(batch).applied
    else:
        with pytest.raises(NonFiniteError):
            update(batch)
    handle.remove()


@pytest.mark.parametrize(
    ("spoil", "options"),
    [
        (interrupted, {}),
        (refused_before_it_began, {}),
        (not_finite, {}),
        (not_finite, {"on_nonfinite": "skip"}),
    ],
)
def test_a_batch_given_again_after_an_error_or_a_skip_draws_the_same_masks(spoil, options):
    assert torch.equal(learnt(spoil, **options), learnt(nothing))


def test_a_batch_that_counted_twice_would_draw_others():
    def counted(update, batch):
        masks_of(update.model).begin()

    assert off(learnt(counted), learnt(nothing)) > 1e-3
