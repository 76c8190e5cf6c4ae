"""Claims of the core for any cut, nesting and size that hypothesis comes up with."""

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import default_collate

from anybatch import (
    Accumulator,
    Coupled,
    MicroBatches,
    Objective,
    SampleList,
    Window,
    info_nce,
    num_rows,
    supervised,
    take_rows,
)
from anybatch.core.batch import split_rows
from anybatch.core.splits import near_equal
from tests.core.test_counting import Encoding, Pair, read_as, shaped_like
from tests.core.test_coupled import Encoder, accumulated, at_once, cut, error, shared
from tests.core.test_window import regression
from tests.reference import gradient, relative_error, whole_batch_gradient


@st.composite
def cut_and_weighted(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    weights = st.floats(0, 100, allow_subnormal=False).map(lambda number: 0.0 if number < 1e-3 else number)
    return sizes, draw(st.lists(weights, min_size=sum(sizes), max_size=sum(sizes)))


@given(cut_and_weighted(), st.integers(0, 100))
def test_any_cut_and_any_weights_give_the_whole_batchs_gradient(cut, seed):
    sizes, weights = cut
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    count = sum(sizes)
    batch = {
        "x": torch.randn(count, 3).double(),
        "nested": (torch.randn(count, 1).double(), torch.tensor(weights).double()),
    }

    def weighted_mean(model: nn.Module, part: Any) -> Tensor:
        target, weight = part["nested"]
        return (weight[:, None] * (model(part["x"]) - target) ** 2).sum() / weight.sum()

    objective = Objective(weighted_mean, units=lambda part: part["nested"][1].double().sum())
    parts = [
        {"x": x, "nested": (y, w)}
        for x, y, w in zip(batch["x"].split(sizes), *(column.split(sizes) for column in batch["nested"]), strict=True)
    ]
    Accumulator(model, objective, micro_batch=1).backward(MicroBatches(parts))
    if sum(weights) == 0:
        assert float(gradient(model.parameters()).abs().max()) == 0
        return
    assert relative_error(model, whole_batch_gradient(model, weighted_mean, batch)) < 1e-11


@given(rows=st.integers(1, 70), micro_batch=st.integers(1, 80))
def test_the_micro_batch_is_a_detail(rows, micro_batch):
    torch.manual_seed(rows)
    model = nn.Linear(4, 3).double()
    batch = (torch.randn(rows, 4).double(), torch.randint(0, 3, (rows,)))
    reference = whole_batch_gradient(model, lambda twin, whole: F.cross_entropy(twin(whole[0]), whole[1]), batch)
    Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch).backward(batch)
    assert relative_error(model, reference) < 1e-12


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_the_mean_over_any_number_of_passes_is_that_of_one_pass(sizes, seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 1).double()
    x, y = torch.randn(sum(sizes), 3).double(), torch.randn(sum(sizes), 1).double()
    reference = whole_batch_gradient(model, regression, (x, y))
    with Window(model.parameters()) as window:
        for part in zip(x.split(sizes), y.split(sizes), strict=True):
            window.backward(regression(model, part), units=len(part[0]))
    assert relative_error(model, reference) < 1e-12
    assert (window.units, window.micro_batches) == (sum(sizes), len(sizes))
    assert float(window.loss) == pytest.approx(float(regression(model, (x, y)).detach()), rel=1e-12)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6), seed=st.integers(0, 50))
def test_any_cut_gives_the_same_gradient(sizes, seed):
    torch.manual_seed(seed)
    model = Encoder(5, dropout=0.0).double()
    batch = torch.randn(sum(sizes), 5).double(), torch.randn(sum(sizes), 5).double()
    coupled = Coupled(shared, info_nce(0.3))
    reference, _, _ = at_once(model, coupled, cut(batch, [sum(sizes)]))
    run, _, _ = accumulated(model, coupled, cut(batch, sizes))
    assert error(run, reference) <= 1e-11


@given(count=st.integers(1, 500), size=st.integers(1, 200))
def test_near_equal_parts_are_as_few_as_possible_and_differ_by_at_most_one(count, size):
    sizes = near_equal(count, size)
    assert sum(sizes) == count
    assert len(sizes) == -(-count // size)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def leaves(count: int) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2)
    tensors = shapes.map(lambda shape: torch.arange(count).reshape(count, *[1] * len(shape)).expand(count, *shape))
    per_row = st.just([f"row {number}" for number in range(count)])
    return st.one_of(tensors, tensors, per_row, st.none(), st.floats(allow_nan=False), st.just(torch.tensor(3)))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Any]:
    """A random nesting whose tensors and lists hold the number of their row."""
    count = draw(st.integers(1, 9))
    nested = st.recursive(
        leaves(count),
        lambda inner: st.one_of(
            st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3),
            st.builds(Pair, inner, inner),
            st.builds(lambda data: Encoding({"data": data}), inner),
        ),
        max_leaves=6,
    )
    return count, {"rows": torch.arange(count), "nested": draw(nested)}


def row_labels(batch: Any) -> list[list[int]]:
    """The row numbers that every row-carrying leaf holds."""
    if isinstance(batch, Tensor):
        return [batch.reshape(batch.shape[0], -1)[:, 0].tolist()] if batch.dim() else []
    if isinstance(batch, list):
        return [[int(name.removeprefix("row ")) for name in batch]]
    held = batch.values() if isinstance(batch, (dict, UserDict)) else batch if isinstance(batch, tuple) else ()
    return [labels for child in held for labels in row_labels(child)]


@given(batches(), st.data())
def test_taking_rows_takes_the_same_rows_of_every_leaf_of_any_nesting(counted, data):
    count, batch = counted
    assert num_rows(batch) == count
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6))
    assert all(labels == chosen for labels in row_labels(take_rows(batch, chosen)))


@given(batches(), st.data())
def test_splitting_gives_every_row_once_and_in_order(counted, data):
    count, batch = counted
    stops = sorted(data.draw(st.sets(st.integers(1, count - 1))) | {count}) if count > 1 else [1]
    sizes = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
    parts = split_rows(batch, sizes)
    assert [num_rows(part) for part in parts] == sizes
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        assert all(labels == list(range(start, start + size)) for labels in row_labels(part))
        start += size


LEAVES = st.one_of(st.lists(st.integers(1, 4), max_size=2).map(tuple), st.just(int), st.just(str))


KINDS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)


@given(kind=KINDS, rows=st.integers(1, 5))
def test_whatever_samples_are_made_of_neither_they_nor_what_is_collated_of_them_is_misread(kind, rows):
    samples = [shaped_like(kind, row) for row in range(rows)]
    assert read_as(SampleList(samples)) == rows
    assert read_as(default_collate(samples)) in (rows, None)
    # the one belief: one or two tensors, or dicts of matrices, are what a loader makes of singles and pairs
    matrices = isinstance(kind, dict) and all(isinstance(inner, tuple) and len(inner) > 1 for inner in kind.values())
    assert read_as(samples) in (rows, None) or (rows <= 2 and (isinstance(kind, tuple) or matrices))
