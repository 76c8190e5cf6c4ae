import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch import BatchError, MicroBatches, Rows, Split, SplitError, num_rows
from anybatch.core.splits import as_split, near_equal


def test_40_rows_by_16_are_14_13_13():
    cut = Rows(16).cut((torch.arange(40), torch.arange(40)))
    assert [num_rows(part) for part in cut] == [14, 13, 13]
    assert torch.cat([part[0] for part in cut]).tolist() == list(range(40))


@given(count=st.integers(1, 500), size=st.integers(1, 200))
def test_near_equal_parts_are_as_few_as_possible_and_differ_by_at_most_one(count, size):
    sizes = near_equal(count, size)
    assert sum(sizes) == count
    assert len(sizes) == -(-count // size)
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_micro_batches_are_views_not_copies():
    whole = torch.zeros(8, 2)
    for part in Rows(3).cut(whole):
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_an_int_stands_for_rows():
    assert as_split(16) == Rows(16)
    assert as_split(np.int64(16)) == Rows(16)
    assert as_split(Rows(4)) == Rows(4)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "16", None])
def test_a_size_that_is_not_a_positive_whole_number_is_refused_with_the_value(size):
    with pytest.raises(SplitError, match=r"1 or more"):
        Rows(size)


@pytest.mark.parametrize("micro_batch", ["16", None, 2.0, Rows])
def test_what_is_no_split_is_refused_with_the_value_and_the_fix(micro_batch):
    with pytest.raises(SplitError, match=r"is not a split.*Rows\(16\)"):
        as_split(micro_batch)


def test_a_batch_cut_into_nothing_is_refused():
    with pytest.raises(BatchError, match="holds 0 micro-batches; give at least 1"):
        MicroBatches([])


class Halving:
    """A split of a user's own, without the base class, that changes itself."""

    def __init__(self, size: int) -> None:
        self.size = size

    def cut(self, batch):
        return Rows(self.size).cut(batch)

    def shrink(self, ran):
        self.size //= 2
        return self if self.size else None


def test_a_split_without_the_base_class_is_wrapped_and_keeps_what_it_has():
    own = Halving(4)
    split = as_split(own)
    assert isinstance(split, Split)
    assert [len(part) for part in split.cut(torch.zeros(8))] == [4, 4]
    assert (split.size, split.learn, split.resized, split.bound, split.need) == (4, None, None, 0, None)
    assert split.shrink(split.cut(torch.zeros(8))) is split, "one that changes itself stays the same split"
    assert own.size == 2
    assert repr(split) == repr(own)


def test_a_split_needs_nothing_but_cut():
    class OneByOne(Split):
        def cut(self, batch):
            return Rows(1).cut(batch)

    split = OneByOne()
    assert as_split(split) is split
    assert split.shrink(split.cut(torch.zeros(2))) is None
    with pytest.raises(NotImplementedError, match=r"Split has no cut\(batch\)"):
        Split().cut(torch.zeros(2))
