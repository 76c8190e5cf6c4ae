from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anybatch import BatchError, num_rows, take_rows
from anybatch.core.batch import split_rows

Pair = namedtuple("Pair", "inputs targets")


@dataclass(frozen=True)
class Sample:
    image: Tensor
    mask: Tensor | None
    names: list[str]
    scale: float = 0.5
    derived: int = field(init=False, default=3)


class Encoding(UserDict[str, Any]):
    """A mapping that carries more than its items, as Hugging Face's BatchEncoding does."""

    def __init__(self, data: dict[str, Any], note: str = "") -> None:
        super().__init__(data)
        self.note = note


def test_rows_are_dim_0_of_every_tensor_and_the_length_of_every_per_row_list():
    batch = {"x": torch.zeros(4, 2), "names": ["a", "b", "c", "d"], "ids": (7, 8, 9, 10), "scale": 0.1, "none": None}
    assert num_rows(batch) == 4
    taken = take_rows(batch, [3, 1])
    assert taken["x"].shape == (2, 2)
    assert taken["names"] == ["d", "b"]
    assert taken["ids"] == (10, 8)
    assert taken["scale"] == 0.1
    assert taken["none"] is None


def test_named_tuples_dataclasses_and_mappings_keep_their_type_and_their_extras():
    x, y = torch.arange(6).reshape(3, 2), torch.arange(3)
    pair = take_rows(Pair(x, y), [2])
    assert isinstance(pair, Pair)
    assert pair.targets.tolist() == [2]
    sample = take_rows(Sample(x, None, ["a", "b", "c"]), [1, 2])
    assert isinstance(sample, Sample)
    assert sample.names == ["b", "c"]
    assert (sample.scale, sample.derived, sample.mask) == (0.5, 3, None)
    encoding = take_rows(Encoding({"input_ids": x}, note="kept"), [0])
    assert isinstance(encoding, Encoding)
    assert encoding.note == "kept"
    assert encoding["input_ids"].tolist() == [[0, 1]]
    assert isinstance(take_rows(OrderedDict(x=x), [0]), OrderedDict)


def test_a_batch_encoding_of_transformers_is_cut_like_a_dict():
    from transformers import BatchEncoding

    whole = BatchEncoding({"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(4)})
    part = take_rows(whole, [1, 3])
    assert isinstance(part, BatchEncoding)
    assert part["labels"].tolist() == [1, 3]
    assert num_rows(whole) == 4, "the whole batch is left alone"


def test_numpy_arrays_and_0_dim_tensors():
    batch = (torch.zeros(3, 1), np.arange(3), torch.tensor(2.0))
    taken = take_rows(batch, [2, 0])
    assert taken[1].tolist() == [2, 0]
    assert taken[2] is batch[2]


def test_the_list_that_default_collate_makes_is_a_container_of_columns():
    batch = [torch.zeros(2, 5), torch.zeros(2)]
    assert num_rows(batch) == 2
    assert [part.shape[0] for part in take_rows(batch, [0])] == [1, 1]


def test_ragged_tensors_beside_a_column_are_one_object_per_row():
    boxes = [torch.zeros(5, 4), torch.zeros(2, 4), torch.zeros(0, 4)]
    batch = {"images": torch.zeros(3, 3, 8, 8), "boxes": boxes}
    assert [tuple(box.shape) for box in take_rows(batch, [2, 0])["boxes"]] == [(0, 4), (5, 4)]


def test_ragged_tensors_in_a_tuple_as_long_as_it_has_rows_do_not_make_the_tuple_per_row():
    x, ragged = torch.arange(2.0), [torch.zeros(3, 4), torch.ones(2, 4)]
    first, second = split_rows((x, ragged), [1, 1])
    assert (first[0].tolist(), second[0].tolist()) == ([0.0], [1.0])
    assert (tuple(first[1][0].shape), tuple(second[1][0].shape)) == ((3, 4), (2, 4))


def test_lists_of_ids_beside_as_many_rows_are_one_list_per_row():
    batch = {"x": torch.zeros(2, 1), "ids": [[1, 2], [3, 4]]}
    assert take_rows(batch, [1])["ids"] == [[3, 4]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), r"batch\[0\] has 4, batch\[1\] has 3"),
        ([torch.zeros(4, 2), torch.zeros(3)], r"batch\[0\] has 4, batch\[1\] has 3"),
        ({"x": torch.zeros(4), "y": {"z": torch.zeros(5)}}, r"batch\['x'\] has 4, batch\['y'\]\['z'\] has 5"),
        ({"x": torch.zeros(4), "names": ["a"]}, r"batch\['x'\] has 4, batch\['names'\] has 1"),
        ({"x": torch.zeros(4), "pair": [torch.zeros(4), torch.zeros(5)]}, r"batch\['pair'\]\[1\] has 5"),
        (Sample(torch.zeros(4), torch.zeros(6), ["a"] * 4), r"batch.image has 4, batch.mask has 6"),
        ((torch.zeros(0, 2), torch.zeros(5)), r"batch\[0\] has 0, batch\[1\] has 5"),
        ((torch.zeros(0, 2), torch.zeros(0)), r"empty: batch\[0\] has 0 rows"),
        ({"text": ["a", "b"]}, r"no tensor: batch\['text'\] is a list of 2 per-row objects"),
        ({"scale": 0.5}, "no rows: dict"),
        (torch.tensor(1.0), "no rows: Tensor"),
        (None, "no rows: NoneType"),
        ([], "no rows: list"),
    ],
)
def test_what_has_no_clear_number_of_rows_gets_an_error_with_the_path_and_the_numbers(batch, message):
    with pytest.raises(BatchError, match=message):
        num_rows(batch)


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
