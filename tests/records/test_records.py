import json

import pytest

from anybatch import RunError
from anybatch.records.run_folder import Run, RunFolder, TracedLayer, UpdateDone, plain


def update_done(number, loss=0.5):
    return UpdateDone(
        update=number,
        epoch=1,
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        units=4.0,
        rows=4,
        micro_batches=2,
        applied=True,
        seconds=0.01,
    )


def a_run(**changes):
    parts = {
        "anybatch": "1",
        "kind": "train",
        "task": "x",
        "created": "now",
        "command": "anybatch",
        "seed": 0,
        "versions": {},
        "git": None,
        "settings": {"lr": 0.1},
    }
    return Run(**(parts | changes))


def test_a_run_comes_back_as_it_was_written(tmp_path):
    folder = RunFolder(tmp_path / "new" / "run")
    run = a_run(summary={"accuracy": 0.5})
    folder.write_run(run)
    assert folder.read_run() == run
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append(update_done(1, loss=float("nan")))
    assert folder.metrics.read_text().startswith('{"event": "update", "update": 1')
    assert folder.read_metrics()[0]["loss"] is None


def test_a_line_that_a_kill_has_cut_off_is_not_read(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append(update_done(1))
    folder.append(update_done(2))
    folder.metrics.write_text(folder.metrics.read_text()[:-20])
    assert [line["update"] for line in folder.read_metrics()] == [1]


def test_rewinding_forgets_the_updates_that_will_run_again(tmp_path):
    folder = RunFolder(tmp_path)
    for number in range(1, 6):
        folder.append(update_done(number))
    folder.metrics.write_text(folder.metrics.read_text() + '{"event": "upd')
    folder.rewind(3)
    folder.append(update_done(4))
    assert [line["update"] for line in folder.read_metrics()] == [1, 2, 3, 4]


def test_shapes_are_called_in_and_out_in_json():
    layer = TracedLayer(name="0", kind="Linear", shapes_in=((1, 2),), shapes_out=((1, 3),), values=(0.5,))
    assert plain(layer) == {"name": "0", "kind": "Linear", "in": [[1, 2]], "out": [[1, 3]], "values": [0.5]}


def test_a_folder_without_run_json_is_named_and_what_to_give_instead(tmp_path):
    with pytest.raises(RunError, match=r"not a run folder: it has no run.json"):
        RunFolder(tmp_path).read_run()


@pytest.mark.parametrize("text", ["", "[1]", '{"kind": "train"}', json.dumps({"other": 1})])
def test_a_foreign_run_json_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"not the run.json of an anybatch run"):
        RunFolder(tmp_path).read_run()
