"""From results to charts, tables and sentences."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from anybatch.app.records.run_folder import read_results
from anybatch.app.records.schema import MicroBatchSeen, TracedImage, spread_of
from anybatch.app.report.chart import evenly_spaced, smooth, thin
from anybatch.app.report.comparison_charts import final_table, written_spread
from anybatch.app.report.headline import headline, summary
from anybatch.app.report.page import image_address, sections, write_page
from anybatch.app.report.proof_charts import shares_picture
from anybatch.app.report.training_charts import lanes_of, stage_totals, timeline_chart
from anybatch.app.report.writing import is_share, number, percent
from tests.app.report.run_folders import (
    compare_folder,
    comparison_fields,
    plan_folder,
    run_fields,
    trace_folder,
    train_folder,
    training_events,
    verify_folder,
    window_event,
    write_json,
    write_lines,
)


def charts_of(folder):
    return {chart.name: chart for section in sections(read_results(folder)) for chart in section.charts}


KINDS = {
    "line": {"name", "look", "percent", "unit"},
    "faint": {"name", "look", "percent", "unit"},
    "points": {"name", "look", "percent", "unit"},
    "area": {"name", "look", "percent", "unit", "fill"},
    "band": set(),
    "bars": {"name", "starts", "lanes", "texts"},
}
"""What the page's script reads of each kind, beside its kind, group, colour and places."""


def complaints(figure):
    """What the page's script could not draw."""
    for trace in figure["data"]:
        wanted = KINDS[trace["kind"]] | {"kind", "group", "colour", "x"} | ({"y"} if trace["kind"] != "bars" else set())
        yield from wanted ^ (set(trace) - {"labels"})
        for name in set(trace) & {"y", "starts", "lanes", "texts", "labels"}:
            yield from [] if len(trace[name]) == len(trace["x"]) else [f"{name} is not as long as x"]
    yield from set(figure) ^ {"data", "x", "y", "stops", "where"}
    yield from {"title", "whole"} - set(figure["x"]) | {"unit", "zero"} - set(figure["y"])


@pytest.mark.parametrize("make", [train_folder, compare_folder, trace_folder, verify_folder, plan_folder])
def test_every_figure_is_one_that_the_script_of_the_page_can_draw(tmp_path, make):
    charts = charts_of(make(tmp_path))
    assert charts
    for chart in charts.values():
        assert list(complaints(chart.figure)) == []


def test_a_figure_with_a_misspelt_or_a_short_part_is_not():
    trace = {"kind": "band", "group": 0, "color": "--series-1", "x": [1, 2], "y": [1]}
    figure = {
        "data": [trace],
        "x": {"title": "", "whole": True},
        "y": {"unit": "", "zero": True},
        "stops": "x",
        "where": [],
    }
    assert set(complaints(figure)) == {"color", "colour", "y is not as long as x"}


def test_a_plan_is_drawn_in_the_unit_of_what_there_is(tmp_path):
    chart = charts_of(plan_folder(tmp_path))["peaks"]
    peaks, limit = chart.figure["data"]
    assert chart.figure["y"] == {"unit": " GiB", "zero": True}
    assert limit["y"] == [5.7, 5.7]
    assert peaks["y"][0] == 1.12


def test_a_task_of_a_file_is_called_by_its_file_and_not_by_its_folder(tmp_path):
    plan_folder(tmp_path)
    text = write_page(tmp_path).read_text()
    assert "<title>mine.py · anybatch plan</title>" in text
    assert "<h1>mine.py</h1>" in text
    assert "/somewhere" not in text


@pytest.mark.parametrize("make", [train_folder, compare_folder, trace_folder])
def test_every_chart_says_what_it_shows_and_has_its_numbers(tmp_path, make):
    for chart in charts_of(make(tmp_path)).values():
        assert chart.caption.endswith(".")
        assert chart.table.rows
        assert {len(row) for row in chart.table.rows} == {len(chart.table.columns)}


def test_a_training_run_has_the_charts_of_the_trace(tmp_path):
    assert list(charts_of(train_folder(tmp_path))) == [
        "epoch-loss",
        "epoch-metric-0",
        "update-loss",
        "learning-rate",
        "gradient-norm",
        "window",
        "memory",
        "memory-peaks",
    ]


def test_what_was_not_recorded_leaves_no_section(tmp_path):
    train_folder(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", [event for event in training_events() if event["event"] == "epoch"])
    assert [section.name for section in sections(read_results(tmp_path))] == ["epochs", "settings"]


def test_metrics_of_an_update_are_charted_where_they_exist(tmp_path):
    train_folder(tmp_path)
    events = [{**event, "metrics": {"accuracy": 0.5}} for event in training_events() if event["event"] == "update"]
    write_lines(tmp_path / "metrics.jsonl", events)
    assert charts_of(tmp_path)["update-metric-0"].title == "Accuracy per update"


def test_a_loss_that_was_never_finite_has_no_chart(tmp_path):
    train_folder(tmp_path)
    events = [{**event, "loss": None} for event in training_events() if event["event"] == "update"]
    write_lines(tmp_path / "metrics.jsonl", events)
    assert "update-loss" not in charts_of(tmp_path)
    assert "gradient-norm" in charts_of(tmp_path)


def test_short_traces_are_drawn_whole():
    assert thin([3.0, 1.0, None], most=3) == [0, 1, 2]


def test_thinning_keeps_every_spike_both_ends_and_the_order():
    luck = random.Random(1)
    values = [luck.random() for _ in range(100_000)]
    values[41_234], values[77_777] = 50.0, -50.0
    kept = thin(values)
    assert len(kept) <= 5000
    assert {0, 41_234, 77_777, 99_999} <= set(kept)
    assert kept == sorted(set(kept))


def test_every_tenth_point_would_have_lost_the_spike():
    values = [0.0] * 100_000
    values[41_234] = 50.0
    assert max(values[::20]) == 0.0
    assert max(values[index] for index in thin(values)) == 50.0


def test_thinning_keeps_a_gap_a_gap():
    values = [1.0] * 5000 + [None] * 10_000 + [2.0] * 5000
    drawn = [values[index] for index in thin(values, most=100)]
    assert drawn.count(None) > 10


def test_rows_of_a_long_table_are_evenly_spread_from_first_to_last():
    rows = evenly_spaced(12_345, most=200)
    assert (rows[0], rows[-1], len(set(rows))) == (0, 12_344, 200)
    steps = {later - earlier for earlier, later in pairwise(rows)}
    assert max(steps) - min(steps) <= 1


def test_smoothing_equals_the_plain_mean_of_the_neighbours():
    luck = random.Random(2)
    values = [None if luck.random() < 0.2 else luck.random() for _ in range(60)]
    for index, mean in enumerate(smooth(values, 7)):
        reach = min(3, index, 59 - index)
        known = [value for value in values[index - reach : index + reach + 1] if value is not None]
        assert mean == (pytest.approx(sum(known) / len(known)) if known else None)


def test_a_long_run_stays_small(tmp_path):
    train_folder(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", training_events(epochs=10, updates_per_epoch=3000))
    for chart in charts_of(tmp_path).values():
        assert all(len(trace["x"]) <= 1000 for trace in chart.figure["data"])
        assert len(chart.table.rows) <= 500
    assert charts_of(tmp_path)["update-loss"].table.note == "500 of 30,000 updates; metrics.jsonl holds them all."


def test_the_timeline_has_a_lane_for_each_micro_batch_and_one_for_the_update(tmp_path):
    train_folder(tmp_path)
    timeline = read_results(tmp_path).windows[-1]
    assert lanes_of(timeline.stages) == ([*(f"micro-batch {index}" for index in range(4)), "update"], 0)
    chart = timeline_chart(timeline)
    drawn = sum(seconds for trace in chart.figure["data"] for seconds in trace["x"])
    assert drawn * 1e-3 == pytest.approx(sum(span.seconds for span in timeline.stages), rel=1e-4)
    assert [key.name for key in chart.keys] == [
        "load",
        "forward",
        "loss",
        "backward",
        "accumulate",
        "clip",
        "step",
        "zero",
    ]


def test_hundreds_of_micro_batches_are_drawn_as_first_and_last(tmp_path):
    train_folder(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", [window_event(num_micro_batches=300)])
    timeline = read_results(tmp_path).windows[0]
    lanes, num_hidden = lanes_of(timeline.stages)
    assert (len(lanes), num_hidden) == (25, 276)
    assert (lanes[0], lanes[12], lanes[-2]) == ("micro-batch 0", "micro-batch 288", "micro-batch 299")
    assert "276 micro-batches in the middle not drawn" in timeline_chart(timeline).caption


def test_stages_nobody_knows_come_last(tmp_path):
    train_folder(tmp_path)
    event = window_event()
    event["stages"].insert(0, {"stage": "offload", "micro_batch": 0, "start": 0.0, "seconds": 1.0})
    write_lines(tmp_path / "metrics.jsonl", [event])
    assert list(stage_totals(read_results(tmp_path).windows[0].stages))[-1] == "offload"


def test_mean_and_deviation_are_those_of_the_seeds():
    assert written_spread(spread_of([1.0, 2.0, 3.0, None]), number) == "2.0 ± 1.0"
    assert written_spread(spread_of([0.97, 0.98]), percent) == "97.5 ± 0.7 %"
    assert written_spread(spread_of([0.5]), number) == "0.5"
    assert spread_of([None]).mean is None


def test_mean_and_deviation_are_written_to_the_same_digit():
    assert written_spread(spread_of([0.09602 - 0.0044, 0.09602 + 0.0044]), number) == "0.0960 ± 0.0062"
    assert written_spread(spread_of([1000.0, 3000.0]), number) == "2,000 ± 1,414"
    assert written_spread(spread_of([0.25, 0.25]), number) == "0.25"


def test_the_table_of_a_comparison_leaves_out_what_nobody_measured(tmp_path):
    results = read_results(compare_folder(tmp_path))
    table = final_table(results.comparison)
    assert "peak memory" not in table.columns
    assert [row[0] for row in table.rows] == ["small batch", "textbook loop", "exact 64", "exact 64, rate by rule"]
    measured = comparison_fields()
    measured["arms"][0]["runs"][0]["peak_bytes"] = 2**20
    write_json(tmp_path / "compare.json", measured)
    assert "peak memory" in final_table(read_results(tmp_path).comparison).columns


def test_the_band_is_one_deviation_around_the_mean(tmp_path):
    results = read_results(compare_folder(tmp_path))
    chart = charts_of(tmp_path)["arms-valid-loss"]
    band, line = chart.figure["data"][:2]
    seeds = [run.epochs[0].valid_loss for run in results.comparison.arms[0].runs]
    spread = spread_of(seeds)
    assert line["y"][0] == pytest.approx(spread.mean, rel=1e-4)
    assert band["y"][0] == pytest.approx(spread.mean + spread.deviation, rel=1e-4)
    assert band["y"][-1] == pytest.approx(spread.mean - spread.deviation, rel=1e-4)


def test_one_seed_has_a_line_and_no_band(tmp_path):
    compare_folder(tmp_path)
    write_json(tmp_path / "compare.json", comparison_fields(seeds=1))
    assert len(charts_of(tmp_path)["arms-metric"].figure["data"]) == 4


def test_arms_that_ended_early_are_drawn_as_far_as_they_go(tmp_path):
    compare_folder(tmp_path)
    fields = comparison_fields()
    fields["arms"][0]["runs"] = []
    fields["arms"][1]["runs"][0]["epochs"] = []
    write_json(tmp_path / "compare.json", fields)
    assert [key.name for key in charts_of(tmp_path)["arms-metric"].keys] == [
        "textbook loop",
        "exact 64",
        "exact 64, rate by rule",
    ]


def test_findings_come_first(tmp_path):
    first, second = sections(read_results(compare_folder(tmp_path)))[:2]
    assert first.notes[0].startswith("At the same learning rate the larger batch is slower")
    assert second.charts


def test_the_gradient_norm_grows_over_the_micro_batches_of_a_trace(tmp_path):
    charts = [chart for chart in charts_of(trace_folder(tmp_path)).values() if chart.title.startswith("Gradient norm")]
    assert [trace["y"] for chart in charts for trace in chart.figure["data"]] == [[0.21, 0.41]]


def test_stages_are_shown_in_their_order(tmp_path):
    stages = sections(read_results(trace_folder(tmp_path)))[0].stages
    assert [title for title, _ in stages] == ["Micro-batch 0", "Micro-batch 1", "The whole batch"]
    assert [entry.stage for entry in stages[0][1]] == ["load", "forward", "loss", "backward", "accumulate"]


def test_a_trace_is_a_picture_with_a_lane_for_each_micro_batch_and_one_for_the_batch(tmp_path):
    lanes = sections(read_results(trace_folder(tmp_path)))[0].lanes
    assert [lane.title for lane in lanes] == ["micro-batch 0", "micro-batch 1", "the whole batch, once"]
    assert [stage for stage, _ in lanes[0].cells] == ["load", "forward", "loss", "backward", "accumulate"]
    assert lanes[-1].cells[-1][0] == "zero"


def test_the_summary_of_a_finished_run_is_one_sentence(tmp_path):
    assert summary(read_results(train_folder(tmp_path))) == (
        "digits reached 97.5 % validation accuracy after 10 epochs: 230 updates with batches of 64 rows "
        "in micro-batches of 16, in 12.5 s."
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [("stopped", "It was stopped at update 100 of 230."), ("running", "It had not ended when this page was written")],
)
def test_the_summary_says_when_a_run_did_not_end(tmp_path, status, words):
    train_folder(tmp_path, status=status)
    write_lines(tmp_path / "metrics.jsonl", [e for e in training_events() if e["update"] <= 100])
    assert words in summary(read_results(tmp_path))


def test_a_run_without_an_update_says_so(tmp_path):
    write_json(tmp_path / "run.json", run_fields())
    assert summary(read_results(tmp_path)) == "digits has not finished an update yet."
    assert [figure.label for figure in headline(read_results(tmp_path))] == ["rows per batch", "parameters"]


def test_the_summary_of_a_comparison_gives_both_ends_and_calls_none_of_them_best(tmp_path):
    said = summary(read_results(compare_folder(tmp_path)))
    assert said == (
        "textbook, trained in 4 ways, 3 seeds each: their mean validation accuracy ends between "
        "94.0 % (textbook loop) and 97.2 % (small batch)."
    )


def test_settings_that_were_not_given_are_named_in_one_line(tmp_path):
    write_json(tmp_path / "run.json", run_fields(settings={"lr": None, "warmup": None, "lr_rule": "linear"}))
    tables = dict(sections(read_results(tmp_path))[-1].tables)
    assert tables["Settings"].rows == (("learning rate rule", "linear"),)
    assert tables["Settings"].note == "Not set: learning rate, warmup."


def test_a_fact_that_is_the_same_in_every_micro_batch_has_no_chart(tmp_path):
    titles = [chart.title for chart in charts_of(trace_folder(tmp_path)).values()]
    assert titles == ["Gradient norm, by micro-batch", "Loss, by micro-batch", "The window of one update"]


def test_a_learning_rate_with_a_warm_up_names_its_peak(tmp_path):
    assert charts_of(train_folder(tmp_path))["learning-rate"].caption == (
        "Learning rate went from 0.004978 to 0.0004329; highest 0.09134."
    )


def test_only_shares_of_one_are_percentages():
    assert is_share("valid_accuracy", [0.5, None])
    assert not is_share("accuracy", [97.0])
    assert not is_share("perplexity", [0.5])


def test_rows_count_once_where_shares_are_in_proportion_to_units_and_not_where_they_are_not():
    ragged = [MicroBatchSeen(rows=2, units=30.0, share=0.75), MicroBatchSeen(rows=2, units=10.0, share=0.25)]
    equal = [replace(part, share=0.5) for part in ragged]
    assert shares_picture(ragged, title="rows").count("counted once") == 2
    assert "counted 0.667 times" in shares_picture(equal, title="rows")
    assert "counted 2 times" in shares_picture(equal, title="rows")


def test_of_a_sum_every_row_counts_once_and_of_no_units_there_is_no_picture():
    parts = [MicroBatchSeen(rows=3, units=3.0, share=1.0), MicroBatchSeen(rows=1, units=1.0, share=1.0)]
    assert shares_picture(parts, title="rows").count("counted once") == 2
    assert shares_picture([MicroBatchSeen(rows=1, units=0.0, share=0.0)], title="rows") is None
    assert shares_picture([], title="rows") is None


def test_a_damaged_image_is_left_out():
    whole = TracedImage(width=2, height=2, channels=1, pixels=(0, 1, 2, 3))
    assert image_address(whole).startswith("data:image/png;base64,")
    assert image_address(replace(whole, pixels=(0, 1, 2))) is None
    assert image_address(replace(whole, channels=2)) is None
