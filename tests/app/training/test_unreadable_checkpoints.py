"""A checkpoint that cannot be read, for whatever reason, is passed over, and a `resume` that fails changes nothing."""

import copy
import io
import json
import os
import pickle
import random
import shutil
import socket

import pytest
import torch

from anybatch import CheckpointError, resume, save
from anybatch.app.records.run_folder import locked
from anybatch.app.training.checkpoints import _MetadataUnpickler, size_and_checksum
from tests.app.training.test_checkpoints import assert_same_bits, make_update, run, weights
from tests.processes.forked import run_function


def signed(path):
    """Give a checkpoint whose files were changed the sums of what they hold now, as one who means harm would."""
    contents = json.loads((path / "checkpoint.json").read_text())
    contents["files"] = {name: size_and_checksum(path / name) for name in contents["files"] if (path / name).exists()}
    contents.pop("sum")
    (path / "checkpoint.json").write_text(json.dumps(contents))


def values_changed(name, change):
    def act(path):
        values = torch.load(path / name, weights_only=True)
        change(values)
        torch.save(values, path / name)

    return act


def garbage(name, text=b"garbage"):
    return lambda path: (path / name).write_bytes(text)


DAMAGE = {
    "no states": garbage("states.pt"),
    "no metadata": garbage(".metadata"),
    "deep metadata": garbage(".metadata", b"(" * 200_000),
    "no tensors": garbage("__0_0.distcp"),
    "no random states": garbage("rank-0.pt"),
    "a random state too short": values_changed("rank-0.pt", lambda values: values.update(torch=torch.zeros(3).byte())),
    "a scheduler that is none": values_changed("states.pt", lambda values: values.update(scheduler=[1, 2])),
    "moments of nothing": values_changed("states.pt", lambda values: values["moments"].update(x=("y", "z"))),
    "no progress": values_changed("states.pt", lambda values: values.pop("progress")),
    "a random state missing": lambda path: (path / "rank-0.pt").unlink(),
}


def state_of(update):
    return (
        weights(update),
        copy.deepcopy(update.optimizer.state_dict()),
        copy.deepcopy(update.scheduler.state_dict()),
        torch.get_rng_state(),
        random.getstate(),
    )


def same(before, update):
    now = state_of(update)
    assert_same_bits(before[0], now[0])
    assert before[2] == now[2]
    assert torch.equal(before[3], now[3])
    assert before[4] == now[4]
    assert before[1]["param_groups"] == now[1]["param_groups"]
    for key, moments in before[1]["state"].items():
        assert all(torch.equal(value, now[1]["state"][key][name]) for name, value in moments.items())


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_read_is_passed_over_and_alone_changes_nothing(tmp_path, damage):
    update = make_update()
    run(update, range(2))
    save(tmp_path, update, number=1)
    good = weights(update)
    run(update, range(2, 4))
    path = save(tmp_path, update, number=2)
    DAMAGE[damage](path)
    signed(path)
    other = make_update(seed=7)
    run(other, range(1))
    before = state_of(other)
    with pytest.raises(CheckpointError, match="update-00000002"):
        resume(path, other)
    same(before, other)
    resumed = resume(tmp_path, other)
    assert resumed.number == 1
    assert len(resumed.passed_over) == 1
    assert_same_bits(weights(other), good)


def test_checkpoint_json_has_a_sum_of_its_own(tmp_path):
    path = save(tmp_path, make_update(), number=3)
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace('"number": 3', '"number": 4'))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: ValueError: it does not have its checksum"):
        resume(tmp_path, make_update())


@pytest.mark.parametrize(
    "name", ["MetadataIndex.__init__.__globals__", "Metadata.__class__", "FileSystemReader.__init__"]
)
def test_dotted_names_in_metadata_are_refused(name):
    text = pickle.GLOBAL + b"torch.distributed.checkpoint.metadata\n" + name.encode() + b"\n."
    text = pickle.PROTO + b"\x04" + text
    with pytest.raises(pickle.UnpicklingError, match="is no class of a module"):
        _MetadataUnpickler(io.BytesIO(text)).load()


def test_temporaries_of_other_processes_are_left_alone(tmp_path):
    gone = run_function(int, 0)  # whatever its number was, ours is another
    assert gone.returncode == 0
    host = socket.gethostname()
    names = {"theirs": f".update-00000002.{host}.{os.getppid()}", "elsewhere": ".update-00000002.another-host.1"}
    names |= {"dead": f".update-00000002.{host}.{2**22 + 1}", "own": f".update-00000002.{host}.{os.getpid()}"}
    for name in names.values():
        (tmp_path / name).mkdir()
    save(tmp_path, make_update(), number=3)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"update-00000003", names["theirs"], names["elsewhere"]}


def test_a_lock_leaves_no_folder_that_nothing_was_written_to(tmp_path):
    with locked(tmp_path / "runs" / "one"):
        assert f"process {os.getpid()} on " in (tmp_path / "runs" / "one" / "run.lock").read_text()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "kept"):
        (tmp_path / "kept" / "run.json").write_text("{}")
    assert (tmp_path / "kept" / "run.lock").is_file()
    shutil.rmtree(tmp_path / "kept")
