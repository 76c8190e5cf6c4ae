import dataclasses
import json

import pytest
import torch
from torch import nn

from anybatch import RunError, plan, supervised, verify
from anybatch.app.records import schema
from anybatch.app.records.run_folder import RunFolder
from anybatch.app.records.schema import PlanRecord, ProofRecord, Run, TracedLayer, UpdateDone
from anybatch.app.records.tolerant_reading import plain, read

RECORDS = [kind for kind in vars(schema).values() if dataclasses.is_dataclass(kind)]


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
    folder.write(run)
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
    with pytest.raises(RunError, match=r"has no run\.json; a run folder holds run\.json.*Give the folder"):
        RunFolder(tmp_path).read_run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[1]", "holds a list"),
        ('{"kind": "train"}', r"keys \['kind'\]; 'kind' and 'task' were expected"),
        (json.dumps({"other": 1}), r"keys \['other'\]"),
    ],
)
def test_a_foreign_run_json_is_refused(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match=message):
        RunFolder(tmp_path).read_run()


def plain_text(value):
    return json.loads(json.dumps(value))


def test_the_record_of_a_proof_holds_all_that_verify_says():
    model = nn.Linear(3, 2)
    batch = torch.randn(7, 3), torch.arange(7) % 2
    said = plain_text(verify(model, supervised(nn.CrossEntropyLoss()), batch, micro_batch=2).as_json())
    assert plain(read(ProofRecord, said)) == said


def test_the_record_of_a_plan_holds_all_that_plan_says():
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    batch = torch.randn(512, 3), torch.arange(512) % 2
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), batch
    whole = plan(*parts, memory="1GiB", checkpointing=False)
    found = plan(*parts, memory=whole.whole_bytes - 1, margin=0.0, checkpointing=False)
    assert found.needs_accumulation
    for planned in (whole, found):
        said = plain_text(planned.as_dict() | {"sentences": ["It fits."]})
        assert plain(read(PlanRecord, said)) == said


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_of_anything_reads_without_an_exception(record):
    names = [schema.JSON_NAMES.get(field.name, field.name) for field in dataclasses.fields(record)]
    for odd in (None, True, "text", [1, "a", None, [2]], {"a": {"b": 1}}, float("inf"), -1, [{}]):
        read(record, dict.fromkeys(names, odd))
        read(record, odd)


def test_an_update_without_its_number_is_no_record_and_without_its_loss_it_is():
    assert read(UpdateDone, {"loss": 0.5}) is None
    assert read(UpdateDone, {"update": 3, "loss": "low", "lr": float("nan"), "rows": 4.0}) == UpdateDone(
        update=3, epoch=None, loss=None, grad_norm=None, lr=None, units=None, rows=4, micro_batches=None, seconds=None
    )
