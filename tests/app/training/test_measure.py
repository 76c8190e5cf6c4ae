import torch
from torch import nn

from anybatch import Update, supervised
from anybatch.app.records.schema import MemoryPoint
from anybatch.app.training.measure import MOST_POINTS, thin_out, with_memory, with_timeline
from anybatch.memory.meter import bytes_of


def wide_update(micro_batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch)


BATCH = (torch.randn(256, 64), torch.randint(0, 4, (256,)))


def test_memory_counts_weights_gradients_and_what_a_micro_batch_needs():
    update = wide_update(32)
    update(BATCH)
    weights = bytes_of(update.parameters())
    _, seen = with_memory(update, BATCH, 3)
    activations = 2 * 32 * 256 * 4  # before and after tanh
    assert weights * 2 + activations < seen.peak_bytes < weights * 2 + 4 * activations
    assert seen.peak_bytes == max(point.bytes for point in seen.points)
    assert {point.stage for point in seen.points} >= {"forward", "backward"}
    assert [point.seconds for point in seen.points] == sorted(point.seconds for point in seen.points)


def test_the_same_batch_in_smaller_micro_batches_takes_less():
    peaks = []
    for micro_batch in (256, 64, 16):
        update = wide_update(micro_batch)
        update(BATCH)
        peaks.append(with_memory(update, BATCH, 2)[1].peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 2 * peaks[2]


def test_looking_changes_no_bit_of_the_result():
    plain, timed, measured = wide_update(32), wide_update(32), wide_update(32)
    plain(BATCH)
    with_timeline(timed, BATCH, 1)
    with_memory(measured, BATCH, 1)
    for one, two, three in zip(*(update.model.parameters() for update in (plain, timed, measured)), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert timed.observer is None


def test_a_timeline_runs_forward_and_holds_every_micro_batch():
    _, seen = with_timeline(wide_update(100), BATCH, 1)
    starts = [stage.start for stage in seen.stages]
    assert starts == sorted(starts)
    assert [stage.micro_batch for stage in seen.stages if stage.stage == "backward"] == [0, 1, 2]


def test_thinning_keeps_the_peak():
    points = [MemoryPoint(seconds=float(number), bytes=number % 977, stage="load") for number in range(5000)]
    thinned = thin_out(points)
    assert len(thinned) <= MOST_POINTS
    assert max(point.bytes for point in thinned) == 976
