"""Rows: near-equal parts; windows(): micro-batches of a loader, grouped."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from anybatch import BatchError, MicroBatches, Rows, Split, SplitError, num_rows, windows
from anybatch.core.splits import as_split


def test_40_rows_by_16_are_14_13_13():
    cut = Rows(16).cut((torch.arange(40), torch.arange(40)))
    assert [num_rows(part) for part in cut] == [14, 13, 13]
    assert torch.cat([part[0] for part in cut]).tolist() == list(range(40))


def test_micro_batches_are_views_not_copies():
    whole = torch.zeros(8, 2)
    for part in Rows(3).cut(whole):
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_an_int_stands_for_rows():
    assert as_split(16) == Rows(16)
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


def test_a_loader_of_micro_batches_is_grouped_and_the_last_window_is_as_short_as_it_is():
    loader = DataLoader(TensorDataset(torch.arange(1000)), batch_size=16)
    groups = list(windows(loader, 4))
    assert all(isinstance(group, MicroBatches) for group in groups)
    assert [len(group) for group in groups] == [4] * 15 + [3]
    assert [len(part) for (part,) in groups[-1]] == [16, 16, 8]
    assert len(windows(loader, 4)) == 16


def test_the_size_may_follow_the_update_number_which_goes_on_over_epochs():
    schedule = windows(range(6), lambda update: 1 if update < 3 else 3)
    assert len(schedule) == 4
    assert [len(group) for group in schedule] == [1, 1, 1, 3]
    assert schedule.update == 4
    assert [len(group) for group in schedule] == [3, 3]


def test_a_resumed_schedule_starts_where_it_is_told():
    schedule = windows(range(6), lambda update: 1 + update)
    schedule.update = 2
    assert [len(group) for group in schedule] == [3, 3]


@pytest.mark.parametrize("size", [0, -2, 1.5, True, None])
def test_a_window_of_no_micro_batches_is_refused_before_the_first(size):
    with pytest.raises(SplitError, match="at update 0; it must be a whole number of micro-batches, 1 or more"):
        windows([1, 2], size)


def test_a_schedule_that_goes_wrong_later_names_the_update():
    with pytest.raises(SplitError, match="size is 0 at update 2"):
        list(windows(range(9), lambda update: 2 - update))


def test_a_loader_without_length_gives_windows_without_length():
    with pytest.raises(TypeError, match="generator, has no length"):
        len(windows((number for number in range(3)), 2))
