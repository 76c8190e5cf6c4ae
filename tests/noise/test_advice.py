"""What a batch is worth, from a noise scale and times: the numbers, and the sentences that carry how far off they may be."""

import dataclasses

import pytest

from anybatch.advice import Tradeoff, advise, advise_run
from anybatch.records import Results, Run, StageTime, UpdateDone, WindowSeen


def test_doubling_is_told_with_the_factor_that_runs_were_off_by():
    told = advise(Tradeoff(noise=48, batch=64), micro_batch=16).sentences
    assert told[1].startswith("Doubling 64 to 128: about 21 % fewer updates, 57 % more samples")
    assert "read 10 rows to 240 rows" in told[0]
    assert "7 % and 87 % to 39 % and 21 %" in told[1]
    assert told[2] == "How long updates take was not measured, so nothing is said of time."


def test_the_soonest_batch_is_where_time_is_least():
    tradeoff = Tradeoff(noise=300, batch=64, fixed=0.02, row=0.0005, least=8)
    assert tradeoff.soonest == pytest.approx(109.54, abs=0.01)
    times = {size: tradeoff.seconds(size) for size in range(8, 1000)}
    assert min(times, key=times.__getitem__) == 110
    assert tradeoff.seconds(4) is None
    assert dataclasses.replace(tradeoff, fixed=0.0).soonest == 8


def test_accumulation_that_brings_nothing_is_called_so_and_one_that_pays_too():
    wasteful = advise(Tradeoff(noise=10, batch=256, fixed=0.0, row=0.001, least=16), micro_batch=16)
    assert "Accumulation costs here and brings nothing: an update after every 16 rows" in wasteful.sentences[2]
    paying = advise(Tradeoff(noise=5000, batch=256, fixed=0.1, row=0.001, least=16), micro_batch=16)
    assert "Accumulation pays here" in paying.sentences[2]
    doubtful = advise(Tradeoff(noise=60, batch=64, fixed=0.02, row=0.001, least=16), micro_batch=16)
    assert "unless the noise is 5 times" in doubtful.sentences[2]
    whole = advise(Tradeoff(noise=60, batch=64, fixed=0.02, row=0.001, least=16), micro_batch=64)
    assert "Accumulation" not in whole.sentences[2]


def recorded(ranks: int, noise: float | None) -> Results:
    """Updates of 64 rows in passes of 10 ms, the last with 20 ms of all-reduce, and a step of 10 ms."""
    run = Run(
        anybatch="0", kind="train", task="t", created="", command="", seed=0, versions={}, git=None, settings={},
        plan={"batch": 64, "micro_batch": 16, "ranks": ranks},
    )  # fmt: skip
    stages = [StageTime(stage="backward", micro_batch=number, start=0.01 * number, seconds=0.01) for number in range(3)]
    stages += [StageTime(stage="backward", micro_batch=3, start=0.03, seconds=0.03)]
    stages += [StageTime(stage="step", micro_batch=None, start=0.06, seconds=0.01)]
    updates = [
        UpdateDone(
            update=number, epoch=1, loss=1.0, grad_norm=1.0, lr=0.1, units=64, rows=64, micro_batches=4 * ranks,
            seconds=0.07, noise_scale=noise,
        )
        for number in range(1, 9)
    ]  # fmt: skip
    return Results(run=run, updates=tuple(updates), windows=(WindowSeen(update=2, stages=tuple(stages)),))


def test_a_run_on_ranks_has_its_all_reduce_beside_its_rows():
    found = advise_run(recorded(2, 50.0))
    assert found.fixed_seconds == pytest.approx(0.03)
    assert found.row_seconds == pytest.approx(0.04 / 64)
    assert found.soonest == pytest.approx((50 * 0.03 / (0.04 / 64)) ** 0.5)
    assert "on 2 ranks, their all-reduce included" in found.sentences[2]
    assert [one.batch for one in found.outlook if one.updates == 1.0] == [64]


def test_a_run_that_measured_nothing_says_how_to():
    found = advise_run(recorded(1, None))
    assert (found.noise_scale, found.outlook) == (None, ())
    assert "train with --noise 8" in found.sentences[0]
