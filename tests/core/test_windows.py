import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from anybatch import MicroBatches, SplitError, windows


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
