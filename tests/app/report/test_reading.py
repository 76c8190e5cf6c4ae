"""What a run folder may hold, what it may lack, and what is said of a folder that is no run."""

import json
import subprocess
import sys

import pytest

from anybatch.app.records.run_folder import read_results
from anybatch.app.records.tolerant_reading import nested, shapes
from anybatch.app.report.writing import written_shapes
from anybatch.errors import RunError
from tests.app.report.run_folders import run_fields, train_folder, training_events, write_json, write_lines


def test_every_event_of_a_run_is_read(tmp_path):
    results = read_results(train_folder(tmp_path))
    assert [point.update for point in results.updates] == list(range(1, 231))
    assert [point.epoch for point in results.epochs] == list(range(1, 11))
    assert [point.update for point in results.updates if not point.applied] == [12]
    assert results.windows[0].stages[0].start == 0.0
    assert len(results.windows[0].stages) == 3 + 4 * 5
    assert [curve.update for curve in results.memory] == [1, 230]
    assert results.num_unreadable == 0


def test_run_json_alone_is_enough(tmp_path):
    write_json(tmp_path / "run.json", {"kind": "train", "task": "digits"})
    results = read_results(tmp_path)
    assert results.updates == results.epochs == ()
    assert results.comparison is None
    assert results.trace is None


def test_a_line_cut_off_by_a_kill_is_left_out_and_counted(tmp_path):
    train_folder(tmp_path)
    path = tmp_path / "metrics.jsonl"
    write_lines(path, training_events(epochs=1)[:5])
    path.write_bytes(path.read_bytes()[:-20])
    results = read_results(tmp_path)
    assert [point.update for point in results.updates] == [1, 2, 3, 4]
    assert results.num_unreadable == 1


def test_a_line_cut_inside_a_letter_is_left_out_too(tmp_path):
    train_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes('{"event": "update", "update": 1, "note": "µ'.encode()[:-1])
    assert read_results(tmp_path).num_unreadable == 1


def test_an_update_logged_again_after_a_resume_counts_once_and_the_later_line_holds(tmp_path):
    train_folder(tmp_path)
    events = training_events(epochs=1)[:6]
    again = [{**event, "loss": 9.0} for event in events[3:]]
    write_lines(tmp_path / "metrics.jsonl", events + again)
    results = read_results(tmp_path)
    assert [point.update for point in results.updates] == [1, 2, 3, 4, 5, 6]
    assert [point.loss == 9.0 for point in results.updates] == [False] * 3 + [True] * 3


def test_numbers_that_are_not_finite_read_as_missing(tmp_path):
    train_folder(tmp_path)
    lines = '{"event":"update","update":1,"loss":NaN}\n{"event":"update","update":2,"loss":null,"lr":-Infinity}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    results = read_results(tmp_path)
    assert [point.loss for point in results.updates] == [None, None]
    assert results.updates[1].lr is None


@pytest.mark.parametrize(
    "line", ['{"event":"update"}', '{"event":"epoch","epoch":"x"}', "[1]", '{"event":"window","update":1}', "{}"]
)
def test_an_event_without_its_number_is_no_event(tmp_path, line):
    train_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    results = read_results(tmp_path)
    assert results.updates == results.epochs == results.windows == ()


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(RunError, match=r"nowhere' does not exist; a run folder holds run\.json.*Give the folder"):
        read_results(tmp_path / "nowhere")


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"has no run\.json.*Give the folder"):
        read_results(tmp_path)


def test_a_file_instead_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file' is a file"):
        read_results(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{not json", r"run\.json' is not JSON .*run again"),
        ("[1, 2]", r"run\.json' holds a list; a JSON object was expected"),
        ('{"name": "some-package"}', r"keys \['name'\]; 'kind' and 'task' were expected"),
    ],
)
def test_a_run_json_of_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=message):
        read_results(tmp_path)


def test_settings_that_are_not_flat_are_shown_as_json(tmp_path):
    write_json(tmp_path / "run.json", run_fields(settings={"betas": [0.9, 0.99], "empty": None}))
    assert read_results(tmp_path).run.settings == {"betas": "[0.9, 0.99]", "empty": None}


def test_shapes_read_as_people_write_them():
    assert written_shapes(shapes([16, 10])) == "16 \N{MULTIPLICATION SIGN} 10"
    assert written_shapes(shapes([[16, 10], [16]])) == "16 \N{MULTIPLICATION SIGN} 10, 16"
    assert written_shapes(shapes([])) == "one number"
    assert written_shapes(shapes([[]])) == "one number"
    assert written_shapes(shapes("any")) == "any"
    assert written_shapes(shapes(None)) == ""


def test_values_keep_their_nesting():
    assert nested([[1, 2.5], [None, "a"]]) == ((1, 2.5), (None, "a"))
    assert nested(None) == ()
    assert nested(3) == (3,)


def test_the_report_loads_no_torch():
    code = "import sys, json, anybatch.app.report; print(json.dumps([name for name in sys.modules if 'torch' in name]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
