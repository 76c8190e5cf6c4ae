"""What `anybatch plan --ranks` prints: numbers with units in, tables and JSON out."""

import json

import pytest

from anybatch.cli.main import run
from anybatch.cli.plans.ranks_tables import ranks_plan_lines, ranks_plan_record
from anybatch.cli.plans.run_ranks_plan import plan_ranks
from anybatch.cli.rates import parse_bandwidth, parse_flops, parse_latency
from anybatch.errors import SettingsError
from anybatch.training.settings import Settings


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("25GB/s", 25e9), ("200Gbit/s", 25e9), ("100Gb/s", 12.5e9), ("800 MB/s", 8e8), ("1GiB/s", 2**30), ("10GBs", 1e10)],
)
def test_a_bandwidth_is_read_with_its_unit(text, bytes_per_second):
    assert parse_bandwidth(text) == bytes_per_second


def test_rates_and_latencies_too():
    assert parse_flops("85TFLOP/s") == parse_flops("85 TFLOPS") == 85e12
    assert parse_latency("10us") == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("parse", "text", "example"),
    [
        (parse_bandwidth, "fast", "25GB/s"),
        (parse_bandwidth, "0GB/s", "25GB/s"),
        (parse_flops, "85", "150TFLOP/s"),
        (parse_latency, "10", "10us"),
    ],
)
def test_what_cannot_be_read_is_shown_with_an_example(parse, text, example):
    with pytest.raises(SettingsError, match=rf"'{text}': expected .*{example}"):
        parse(text)


@pytest.fixture(scope="module")
def ranks_plan():
    settings = Settings(micro_batch=16, batch_size=4096, device="cpu")
    return plan_ranks("textbook", settings, ranks=64, bandwidth=25e9, latency=10e-6, flops=None)


def test_a_task_is_timed_here_and_the_batch_asked_for_is_among_the_rows(ranks_plan):
    lines = ranks_plan_lines(ranks_plan)
    assert lines[0].startswith("one micro-batch of 16 rows: forward ")
    assert "(the median of 5 measured here, on cpu)" in lines[0]
    assert "64 ranks, 25 GB/s each, 10.0 us per message" in lines[1]
    assert any(line.startswith("4 ") and " 4,096 " in line for line in lines)
    assert ranks_plan.one_pass.gradient_bytes == ranks_plan.one_pass.parameter_bytes > 0


def test_the_record_is_plain_and_holds_the_same_numbers(ranks_plan):
    record = json.loads(json.dumps(ranks_plan_record(ranks_plan)))
    assert record["ranks"] == 64
    assert [update["micro_batches"] for update in record["updates"]] == [1, 2, 4, 8, 16, 32]
    first, last = record["updates"][0], record["updates"][-1]
    assert first["seconds"] == first["seconds_each"]
    assert last["efficiency"] > last["efficiency_each"]
    assert record["batch_for"]["0.95"] % (64 * 16) == 0


def test_with_a_rate_nothing_is_timed_and_the_source_says_so():
    network = {"ranks": 8, "bandwidth": 25e9, "latency": 10e-6}
    once = plan_ranks("digits", Settings(device="cpu"), **network, flops=1e12).one_pass
    again = plan_ranks("digits", Settings(device="cpu"), **network, flops=2e12).one_pass
    assert "FLOPs at 1e+12 FLOP/s" in once.source
    assert once.forward == pytest.approx(2 * again.forward)
    assert once.backward > once.forward


def test_the_command_prints_tables_or_json_and_a_bad_rate_is_usage(capsys):
    assert run(["plan", "textbook", "--ranks", "64", "--bandwidth", "25GB/s", "--device", "cpu"]) == 0
    assert "how large the batch must be" in capsys.readouterr().out
    assert run(["plan", "textbook", "--ranks", "4", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 4
    assert run(["plan", "textbook", "--bandwidth", "25GB/s"]) == 2
    assert "is of a plan for many ranks: say how many, such as --ranks 64" in capsys.readouterr().err
    assert run(["plan", "textbook", "--ranks", "64", "--bandwidth", "fast"]) == 2
    assert "'fast': expected what a rank can send, such as 25GB/s" in capsys.readouterr().err
    assert run(["plan", "textbook", "--ranks", "0"]) == 2
