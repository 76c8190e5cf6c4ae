"""How many rows a batch has: columns, samples, or an error that names both readings and the way out."""

import random
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from anybatch import BatchError, MicroBatches, Rows, SampleList, SplitError, Stacked, num_rows, take_rows
from anybatch.core.batch import check_row_dim, holds_samples, split_rows
from anybatch.core.splits import AsGiven, CutFurther

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


TWO_WAYS = (
    r"can be read in two ways: {} samples, one per row; or {} columns of {} rows each.*collate=.*SampleList.*tuple"
)


def tokens(*lengths: int) -> list[Tensor]:
    return [torch.arange(length) for length in lengths]


@dataclass
class Scan:
    image: Tensor
    label: int


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.zeros(3, 8, 8), 1)] * 4,
        [(torch.zeros(3, 8, 8), torch.tensor(1))] * 4,
        [(torch.zeros(3, 8, 8), torch.zeros(3))] * 4,
        [[torch.zeros(3, 8, 8), 1]] * 4,
        [{"image": torch.zeros(3, 8, 8), "label": 1}] * 4,
        [{"input_ids": torch.zeros(length), "labels": torch.zeros(length)} for length in (4, 2, 3)],
        [(torch.zeros(length), torch.zeros(length)) for length in (4, 2, 3)],
        [Scan(torch.zeros(3, 8, 8), 1)] * 4,
        ((torch.zeros(3, 8, 8), 1),) * 4,
        SampleList(tokens(12, 12, 12)),
        SampleList(["a text", "another"]),
    ],
    ids=str,
)
def test_a_list_of_like_samples_is_one_row_each(samples):
    assert num_rows(samples) == len(samples)
    parts = Rows(2).cut(samples)
    assert sum(num_rows(part) for part in parts) == len(samples)
    assert [id(sample) for part in parts for sample in part] == [id(sample) for sample in samples]
    assert all(isinstance(part, type(samples)) for part in parts)


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ([torch.zeros(6, 2)], 6),
        ([torch.zeros(6, 2), torch.zeros(6, 2)], 6),
        ([torch.zeros(6, 2), torch.zeros(6, 1)], 6),
        ([torch.zeros(6, 2), torch.zeros(6), torch.zeros(6).long()], 6),
        ((torch.zeros(6, 2),) * 5, 6),
        ([{"ids": torch.zeros(6, 2)}, torch.zeros(6)], 6),
        ([{"ids": torch.zeros(6, 2)}, {"ids": torch.zeros(6, 2)}], 6),
        ([[torch.zeros(6, 2), torch.zeros(6, 2)], torch.zeros(6)], 6),
        ([("a", "b"), torch.zeros(2)], 2),
        ({"views": [torch.zeros(6, 2), torch.zeros(6, 2)]}, 6),
        (([{"ids": torch.zeros(6, 2)}, {"ids": torch.zeros(6, 2)}], None), 6),
    ],
    ids=str,
)
def test_what_collation_makes_is_columns(columns, rows):
    assert num_rows(columns) == rows
    assert [num_rows(part) for part in Rows(1).cut(columns)] == [1] * rows


def test_every_collation_of_torch_is_read_as_it_was_made():
    x, y = torch.randn(7, 3), torch.arange(7)
    for dataset in (TensorDataset(x), TensorDataset(x, x), TensorDataset(x, y), TensorDataset(x, y, x[:, 0])):
        for batch in DataLoader(dataset, batch_size=7):
            assert num_rows(batch) == 7
    assert num_rows(default_collate([{"x": row, "pair": (row, row)} for row in x])) == 7


@pytest.mark.parametrize(
    ("batch", "rows", "columns"),
    [
        (tokens(*[12] * 8), 8, 12),
        ([torch.zeros(3, 8, 9), torch.zeros(3, 9, 8), torch.zeros(3, 7, 7)], 3, 3),
        ([{"ids": torch.zeros(12), "labels": torch.zeros(12)}] * 8, 8, 12),
        ([(torch.zeros(12), torch.zeros(12))] * 8, 8, 12),
        ([[torch.zeros(12, 2), torch.zeros(12)]] * 2, 2, 12),
        ([{"ids": torch.zeros(12)}, {"ids": torch.zeros(12)}], 2, 12),
        ([{"ids": torch.zeros(12, 2)}] * 3, 3, 12),
    ],
    ids=str,
)
def test_what_can_be_read_two_ways_is_an_error_with_both_and_the_way_out(batch, rows, columns):
    for ask in (num_rows, Rows(2).cut):
        with pytest.raises(BatchError, match=TWO_WAYS.format(rows, rows, columns)):
            ask(batch)
    assert num_rows(SampleList(batch)) == rows
    assert num_rows(tuple(batch)) == columns


@pytest.mark.parametrize(
    "batch", [tokens(3, 5, 4), tokens(3, 5), [{"ids": torch.zeros(n, 2)} for n in (3, 5)]], ids=str
)
def test_tensors_that_disagree_are_refused_because_the_next_two_may_agree_by_chance(batch):
    for ask in (num_rows, Rows(2).cut):
        with pytest.raises(BatchError, match=r"columns that disagree on their rows \(3, 5.*collate=.*SampleList"):
            ask(batch)
    assert num_rows(SampleList(batch)) == len(batch)


def scene(chance: random.Random, images: int) -> dict[str, object]:
    boxes = [chance.randint(1, 5) for _ in range(images)]
    targets = [{"boxes": torch.zeros(count, 4), "labels": torch.zeros(count).long()} for count in boxes]
    return {"images": torch.zeros(images, 3, 8, 8), "targets": targets}


def refusal(batch: object) -> str:
    try:
        Rows(1).cut(batch)
    except BatchError as error:
        return str(error)
    return ""


def test_detection_batches_are_rows_or_refused_and_never_columns_by_chance():
    chance, refused = random.Random(0), 0
    for _ in range(1000):
        batch = scene(chance, chance.randint(2, 4))
        said = refusal(batch)
        if said:
            refused += 1
            assert "batch['targets'] can be read in two ways" in said
            batch["targets"] = SampleList(batch["targets"])
        parts = Rows(1).cut(batch)
        shapes = [target["boxes"].shape for target in batch["targets"]]
        assert [part["targets"][0]["boxes"].shape for part in parts] == shapes
        assert all(num_rows(part) == 1 for part in parts)
    assert 10 < refused < 150


def test_taking_rows_refuses_dicts_that_may_be_rows_or_columns_and_takes_them_once_marked():
    targets = [{"boxes": torch.full((3, 4), float(row)), "labels": torch.full((3,), row)} for row in range(3)]
    images = torch.arange(3.0)
    with pytest.raises(BatchError, match=r"batch\[1\] can be read in two ways: 3 objects, one per row"):
        take_rows((images, targets), [2])
    _, (taken,) = take_rows((images, SampleList(targets)), [2])
    assert taken is targets[2]
    _, (taken,) = take_rows((images[:2], targets[:2]), [1])
    assert taken is targets[1]


def test_micro_batches_of_the_users_own_are_not_cut_further_where_dicts_may_be_rows_or_columns():
    given = MicroBatches([(torch.zeros(2, 3), [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(2, 4)}])])
    with pytest.raises(BatchError, match=r"batch\[1\] can be read in two ways"):
        CutFurther(AsGiven(), 1).cut(given)


@pytest.mark.parametrize("images", [1, 2])
def test_a_short_batch_as_zip_leaves_it_is_refused_where_boxes_are_as_many_as_channels(images):
    samples = [(torch.zeros(3, 4, 4), {"boxes": torch.zeros(3, 4)})] * images
    with pytest.raises(BatchError, match=r"the lists of this batch can be read in two ways"):
        Rows(1).cut(tuple(zip(*samples, strict=True)))


def test_columns_of_samples_as_zip_leaves_them_are_one_object_per_row():
    images = (torch.zeros(3, 4, 4), torch.zeros(3, 5, 5), torch.zeros(3, 6, 6), torch.zeros(3, 7, 7))
    targets = tuple({"boxes": torch.zeros(count, 4)} for count in (2, 1, 3, 2))
    for batch in ((images, targets), [images, targets]):
        assert [len(part[0]) for part in Rows(2).cut(batch)] == [2, 2]
        assert Rows(1).cut(batch)[2][1][0]["boxes"].shape == (3, 4)
    same = tuple({"boxes": torch.zeros(3, 4)} for _ in range(4))
    with pytest.raises(BatchError, match="4 objects, one per row; or 4 columns of 3 rows each"):
        Rows(1).cut((images, same))


def test_a_nested_list_cut_to_two_rows_is_read_as_its_batch_was():
    batch = {"x": torch.arange(6), "pair": [torch.arange(6), torch.arange(6)]}
    part = Rows(2).cut(batch)[1]
    assert num_rows(part) == 2
    assert [column.tolist() for column in part["pair"]] == [[2, 3], [2, 3]]
    ragged = {"x": torch.arange(3), "boxes": [torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(5, 4)]}
    taken = take_rows(ragged, [0, 1])
    assert num_rows(taken) == 2
    assert take_rows(taken, [1])["boxes"][0].shape == (2, 4)


def test_raw_samples_are_collated_per_micro_batch():
    cut = Rows(3, collate=default_collate).cut([(torch.tensor([row]), row) for row in range(5)])
    assert [part[1].tolist() for part in cut] == [[0, 1, 2], [3, 4]]
    assert cut.row_numbers == ((0, 1, 2), (3, 4))
    kept = Rows(3, collate=list).cut(tokens(12, 12, 12, 12))
    assert [num_rows(part) for part in kept] == [2, 2]
    with pytest.raises(SplitError, match=r"Rows\(collate=\.\.\.\) cuts a list of raw samples, got a Tensor"):
        Rows(3, collate=default_collate).cut(torch.zeros(4))


def test_time_first_batches_are_cut_along_the_dim_that_is_named():
    batch = (torch.arange(24).reshape(4, 6), torch.arange(6), torch.zeros(4, 6, 2))
    cut = Rows(4, batch_dim=1).cut(batch)
    assert [tuple(part[2].shape) for part in cut] == [(4, 3, 2), (4, 3, 2)]
    assert torch.equal(torch.cat([part[0] for part in cut], 1), batch[0])
    assert torch.cat([part[1] for part in cut]).tolist() == list(range(6))
    assert all(part[0].is_contiguous() for part in cut)
    assert cut.row_numbers == ((0, 1, 2), (3, 4, 5))
    assert Rows(4, batch_dim=1).shrink(cut).batch_dim == 1
    for dim in (-1, 1.0, True):
        with pytest.raises(SplitError, match=r"expected the dim that is the rows"):
            Rows(4, batch_dim=dim)


@pytest.mark.parametrize("layer", [nn.LSTM(3, 3), nn.GRU(3, 3), nn.TransformerEncoderLayer(2, 1)], ids=str)
def test_a_model_that_takes_time_first_is_refused_where_both_dims_may_be_rows(layer):
    model = nn.Sequential(nn.Linear(3, 3), layer)
    for batch in (
        (torch.zeros(7, 5, 3), torch.zeros(7, 5)),
        torch.zeros(7, 5, 3),
        (torch.zeros(5, 5, 3), torch.zeros(5)),
    ):
        with pytest.raises(BatchError, match=r"1 \(.*takes time first and rows second.*batch_dim=1.*batch_dim=0"):
            check_row_dim(model, batch)
    check_row_dim(model, (torch.zeros(7, 5, 3), torch.zeros(7)))
    check_row_dim(model, {"attention_mask": torch.zeros(7, 5)})
    check_row_dim(nn.LSTM(3, 3, batch_first=True), torch.zeros(7, 5, 3))


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Stacked(2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (lambda batch: batch % 4, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (lambda batch: [5, 5, 5, 2, 2, 9, 9, 9], [[0, 1, 2], [3, 4], [5, 6, 7]]),
    ],
)
def test_rows_that_belong_together_stay_together_in_their_own_order(groups, wanted):
    cut = Rows(4, groups=groups).cut(torch.arange(8))
    assert [part.tolist() for part in cut] == wanted
    assert [list(rows) for rows in cut.row_numbers] == wanted


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Rows(1, groups=2), r"2 rows belong together, and a group is never torn. Use Rows\(2, groups"),
        (Rows(4, groups=3), r"8 rows is no whole number of groups.*multiple of 3"),
        (Rows(4, groups=Stacked(3)), r"8 rows is no whole number of groups"),
        (Rows(4, groups=lambda batch: [1, 2]), r"gave 2 numbers for 8 rows"),
        (Rows(4, groups=-2), r"no whole number of groups"),
        (Rows(4, groups="pairs"), r"groups='pairs': expected how many neighbouring rows"),
    ],
)
def test_groups_that_cannot_be_are_refused(split, message):
    with pytest.raises(SplitError, match=message):
        split.cut(torch.arange(8))


def test_micro_batches_say_that_they_must_stay_whole():
    assert not MicroBatches([1]).whole
    assert MicroBatches([1], whole=True).whole
    assert not holds_samples(MicroBatches([1]))


def test_micro_batches_that_are_cut_further_are_read_as_they_were_when_they_were_cut():
    batch = {"x": torch.arange(6), "pair": [torch.arange(6), torch.arange(6)]}
    cut = CutFurther(Rows(2), 1).cut(batch)
    assert [part["pair"][1].tolist() for part in cut] == [[row] for row in range(6)]


def shaped_like(kind: object, row: int) -> object:
    """A sample of this kind: its numbers say which row it is, so that it is told apart from all others."""
    if isinstance(kind, tuple) and all(isinstance(size, int) for size in kind):
        return torch.full(kind, float(row))
    if isinstance(kind, dict):
        return {name: shaped_like(inner, row) for name, inner in kind.items()}
    if isinstance(kind, list):
        return tuple(shaped_like(inner, row) for inner in kind)
    return row if kind is int else f"row {row}"


def read_as(batch: object) -> int | None:
    """How many rows a batch is cut into; None where it is refused."""
    try:
        return len(Rows(1).cut(batch))
    except BatchError:
        return None
