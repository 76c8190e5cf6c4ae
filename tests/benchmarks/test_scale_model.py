"""The model of many ranks: against a ring and a pipeline that are played through step by step, and against its own limits."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from anybatch import ParallelError
from benchmarks import scale
from benchmarks.scale_model import Network, PassSeconds, Projection, Sharding, overlapped

NETWORK = Network(ranks=8, bandwidth=10e9, latency=5e-6)
PASS = PassSeconds(rows=8, forward=0.02, backward=0.04, gradient_bytes=400e6, parameter_bytes=400e6)


def ring_all_reduce(network, num_bytes):
    """Played through: each rank sends one chunk to the next in every round, until all have the sum of all."""
    size = network.ranks
    held = [[{rank} for _ in range(size)] for rank in range(size)]
    rounds = 0
    for phase in ("scatter", "gather"):
        for step in range(size - 1):
            shift = 0 if phase == "scatter" else 1
            sent = [(rank, (rank + shift - step) % size) for rank in range(size)]
            for (rank, chunk), content in zip(sent, [set(held[rank][chunk]) for rank, chunk in sent], strict=True):
                held[(rank + 1) % size][chunk] |= content
            rounds += 1
    assert all(chunk == set(range(size)) for rank in held for chunk in rank)
    return rounds * (num_bytes / size / network.bandwidth + network.latency)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_all_reduce_takes_as_long_as_a_ring_that_is_played_through(ranks):
    network = replace(NETWORK, ranks=ranks)
    assert network.all_reduce(1e8) == pytest.approx(ring_all_reduce(network, 1e8))


@pytest.mark.parametrize(("compute", "transfer", "parts"), [(4, 1, 3), (4, 9, 3), (4, 4, 7), (1, 5, 1)])
def test_overlap_is_that_of_steps_played_through(compute, transfer, parts):
    done = 0.0
    for part in range(1, parts + 1):  # gradients: ready, then sent
        done = max(done, compute * part / parts) + transfer / parts
    assert overlapped(compute, transfer, parts) == pytest.approx(done)
    done = 0.0
    for part in range(1, parts + 1):  # parameters: there, then used
        done = max(done, transfer * part / parts) + compute / parts
    assert overlapped(compute, transfer, parts) == pytest.approx(done)


def test_one_synchronisation_approaches_full_efficiency_and_one_each_does_not():
    each = [Projection(network=NETWORK, one_pass=PASS, micro_batches=count) for count in (1, 4, 64, 1024)]
    assert each[0].seconds == each[0].seconds_each
    assert each[0].efficiency < each[1].efficiency < each[2].efficiency < each[3].efficiency < 1
    assert len({one.efficiency_each for one in each}) == 1
    assert each[3].efficiency > 0.999


@pytest.mark.parametrize("efficiency", [0.5, 0.9, 0.95, 0.99])
def test_the_batch_for_an_efficiency_is_the_smallest_that_reaches_it(efficiency):
    found = Projection(network=NETWORK, one_pass=PASS, micro_batches=1).reaching(efficiency)
    assert found.efficiency >= efficiency - 1e-9
    if found.micro_batches > 1:
        assert replace(found, micro_batches=found.micro_batches - 1).efficiency < efficiency
    assert found.batch == 8 * 8 * found.micro_batches


def test_one_rank_sends_nothing_and_a_fast_network_exposes_one_bucket():
    alone = Projection(network=replace(NETWORK, ranks=1), one_pass=PASS, micro_batches=4)
    assert alone.efficiency == alone.efficiency_each == 1
    assert alone.bytes_sent == 0
    fast = Projection(network=replace(NETWORK, bandwidth=100e9), one_pass=PASS, micro_batches=4)
    assert fast.exposed == pytest.approx(fast.all_reduce / PASS.num_buckets)


def test_keeping_parameters_sends_less_and_holds_more_and_both_send_gradients_once():
    projection = Projection(network=NETWORK, one_pass=PASS, micro_batches=6)
    freed, kept = (Sharding(projection=projection, keeps=keeps) for keeps in (False, True))
    assert freed.bytes_sent == pytest.approx(7 / 8 * (12 + 1) * 400e6)
    assert kept.bytes_sent == pytest.approx(7 / 8 * (1 + 1) * 400e6) == pytest.approx(projection.bytes_sent)
    assert kept.seconds < freed.seconds
    assert kept.bytes_held == 8 * freed.bytes_held


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ParallelError, match=r"bandwidth=0.*a bandwidth above 0"):
        Network(ranks=2, bandwidth=0)
    with pytest.raises(ParallelError, match=r"rows=0.*1 row or more"):
        replace(PASS, rows=0)
    with pytest.raises(ParallelError, match=r"efficiency=1: expected a share between 0 and 1"):
        Projection(network=NETWORK, one_pass=PASS, micro_batches=1).reaching(1)


def test_the_tables_and_the_picture_of_the_page_are_what_the_model_says():
    docs = Path(__file__).parents[2] / "docs"
    blocks = re.findall(r"```text\n(.*?)\n```", (docs / "benchmarks/scale.md").read_text(), re.DOTALL)
    assert blocks == ["\n".join(lines) for lines in scale.tables()]
    assert (docs / "pictures" / "scale.svg").read_text() == scale.picture()
