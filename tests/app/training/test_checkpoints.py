import json
import os
import pickle
import random
import socket

import numpy
import pytest
import torch
from torch import nn

from anybatch import (
    CheckpointError,
    Cost,
    Coupled,
    Objective,
    Tokens,
    Update,
    clip_loss,
    resume,
    save,
    supervised,
    warmup,
)
from anybatch.app.training.checkpoints import (
    checkpoints_in,
    random_states,
    read_tensors,
    restore_random_states,
    size_and_checksum,
)
from tests.core.test_batches_not_misread import Dropping, ragged, read


def make_update(seed=0, width=5, optimizer_type=torch.optim.AdamW, scheduler=True, scaler=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
    optimizer = optimizer_type(model.parameters(), lr=0.01)
    return Update(
        model,
        optimizer,
        supervised(nn.CrossEntropyLoss()),
        micro_batch=4,
        batch_norm="micro",
        scheduler=warmup(optimizer, 3) if scheduler else None,
        scaler=torch.amp.GradScaler("cpu", init_scale=64.0) if scaler else None,
    )


def a_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 4, generator=generator), torch.randint(0, 2, (9,), generator=generator)


def run(update, batches):
    for number in batches:
        update(a_batch(number))


def weights(update):
    return {name: value.clone() for name, value in update.model.state_dict().items()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("scaler", [False, True])
def test_what_goes_on_from_a_checkpoint_ends_bit_for_bit_where_it_would_have(tmp_path, scaler):
    straight = make_update(scaler=scaler)
    run(straight, range(4))
    save(tmp_path, straight, number=4, progress={"epoch": 2})
    run(straight, range(4, 9))
    other = make_update(seed=99, scaler=scaler)
    resumed = resume(tmp_path, other)
    assert resumed is not None
    assert (resumed.number, resumed.progress) == (4, {"epoch": 2})
    run(other, range(4, 9))
    assert_same_bits(weights(straight), weights(other))
    assert other.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]


def test_without_the_random_states_it_does_not(tmp_path):
    straight = make_update()
    run(straight, range(4))
    save(tmp_path, straight, number=4)
    run(straight, range(4, 9))
    other = make_update(seed=99)
    resume(tmp_path, other)
    torch.manual_seed(3)
    run(other, range(4, 9))
    assert not torch.equal(weights(straight)["0.weight"], weights(other)["0.weight"])


def test_every_random_state_is_put_back():
    states = random_states()
    drawn = (torch.rand(3).tolist(), random.random(), numpy.random.rand())
    restore_random_states(states)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == drawn


def test_the_last_few_are_kept(tmp_path):
    update = make_update()
    for number in range(1, 8):
        save(tmp_path, update, number=number, keep=2)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["update-00000007", "update-00000006"]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_resumes_nothing(tmp_path):
    assert resume(tmp_path, make_update()) is None
    assert resume(tmp_path / "not there", make_update()) is None


def test_a_truncated_newest_checkpoint_is_passed_over(tmp_path):
    update = make_update()
    run(update, range(2))
    save(tmp_path, update, number=2)
    good = weights(update)
    run(update, range(2, 4))
    newest = save(tmp_path, update, number=4)
    tensors = newest / "__0_0.distcp"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    other = make_update(seed=99)
    resumed = resume(tmp_path, other)
    assert resumed is not None
    assert resumed.number == 2
    assert "update-00000004 is damaged: __0_0.distcp has" in resumed.passed_over[0]
    assert_same_bits(weights(other), good)


def test_one_flipped_bit_is_noticed(tmp_path):
    update = make_update()
    path = save(tmp_path, update, number=1)
    tensors = path / "__0_0.distcp"
    raw = bytearray(tensors.read_bytes())
    at = raw.find(update.model[0].weight.detach().numpy().tobytes())
    assert at > 0
    raw[at] ^= 1
    tensors.write_bytes(raw)
    read_tensors(path, {"model.0.weight": torch.empty(5, 4)})  # torch itself does not notice
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp does not have its checksum"):
        resume(path, make_update())


@pytest.mark.parametrize("name", [".metadata", "states.pt", "rank-0.pt", "checkpoint.json", "__0_0.distcp"])
def test_a_missing_file_is_named(tmp_path, name):
    path = save(tmp_path, make_update(), number=1)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        resume(tmp_path, make_update())


@pytest.mark.parametrize("content", [b"", b"hello", b'{"weight": 3}', b"[1]", b'{"anybatch": "run"}'])
def test_a_foreign_folder_is_named(tmp_path, content):
    path = tmp_path / "update-00000001"
    path.mkdir()
    (path / "checkpoint.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"update-00000001 is no whole checkpoint: checkpoint\.json"):
        resume(tmp_path, make_update())


def test_a_checkpoint_of_a_later_format_is_refused_by_its_number(tmp_path):
    path = save(tmp_path, make_update(), number=1)
    contents = path / "checkpoint.json"
    contents.write_text(contents.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(CheckpointError, match="has format 3; this version of anybatch reads format 2"):
        resume(tmp_path, make_update())


def test_a_checkpoint_of_before_which_was_one_file_is_refused_with_what_to_do(tmp_path):
    torch.save({"anybatch": "checkpoint", "format": 1}, tmp_path / "update-00000001.pt")
    for path in (tmp_path, tmp_path / "update-00000001.pt"):
        with pytest.raises(CheckpointError, match=r"is a file; .* is a folder.*with the version that saved them"):
            resume(path, make_update())


def test_metadata_that_would_run_code_does_not(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "it ran"),)

    path = save(tmp_path, make_update(), number=1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    contents = json.loads((path / "checkpoint.json").read_text())
    contents["files"][".metadata"] = size_and_checksum(path / ".metadata")
    del contents["sum"]
    (path / "checkpoint.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir does not belong"):
        resume(tmp_path, make_update())
    assert not (tmp_path / "it ran").exists()


def test_saving_a_number_again_replaces_it(tmp_path):
    update = make_update()
    save(tmp_path, update, number=1)
    run(update, range(2))
    save(tmp_path, update, number=1)
    other = make_update(seed=99)
    resume(tmp_path, other)
    assert_same_bits(weights(other), weights(update))
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    save(tmp_path, make_update(), number=1).rename(tmp_path / "update-00000001-replaced")
    resumed = resume(tmp_path, make_update())
    assert resumed is not None
    assert resumed.number == 1
    save(tmp_path, make_update(), number=2)
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000002"]


@pytest.mark.parametrize("owner", ["", f".{socket.gethostname()}.{2**22 + 1}"], ids=["by 0.1", "by an ended process"])
def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path, owner):
    left = tmp_path / f".update-00000003{owner}"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    assert resume(tmp_path, make_update()) is None
    save(tmp_path, make_update(), number=4)
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000004"]


def test_when_none_can_be_read_all_are_named(tmp_path):
    for number in (1, 2):
        (tmp_path / f"update-0000000{number}").mkdir()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints.*00000002.*00000001"):
        resume(tmp_path, make_update())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"width": 6}, r"another model: '0.bias' is \(5,\) torch.float32 in the checkpoint and \(6,\)"),
        ({"optimizer_type": torch.optim.SGD}, "saved with AdamW, this run has SGD"),
        ({"scheduler": False}, "has a scheduler, this run has none"),
        ({"scaler": True}, "has no scaler, this run has one"),
    ],
)
def test_a_checkpoint_of_something_else_changes_nothing(tmp_path, other, message):
    save(tmp_path, make_update(), number=1)
    update = make_update(seed=7, **other)
    before = weights(update)
    with pytest.raises(CheckpointError, match=message):
        resume(tmp_path, update)
    assert_same_bits(weights(update), before)


def test_contents_that_could_not_be_loaded_again_are_refused_before_they_get_a_name(tmp_path):
    with pytest.raises(CheckpointError, match="written but not read back"):
        save(tmp_path, make_update(), number=1, progress={"folder": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    update = make_update()
    save(tmp_path, update, number=1)

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, update, number=2)
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]


def test_a_full_disk_is_an_error_of_ours_and_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    update = make_update()
    save(tmp_path, update, number=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"could not be written: on rank 0, OSError: .*No space left"):
        save(tmp_path, update, number=2)
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000001"]


def test_an_optimizer_goes_on_with_parameters_that_never_had_a_gradient(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        objective = Objective(lambda model, batch: nn.functional.cross_entropy(model[0](batch[0]), batch[1]))
        return Update(model, optimizer, objective, micro_batch=4)

    straight, other = build(0), build(1)
    run(straight, range(2))
    save(tmp_path, straight, number=2)
    run(straight, range(2, 4))
    resume(tmp_path, other)
    run(other, range(2, 4))
    assert_same_bits(weights(straight), weights(other))


def test_a_loader_goes_back_to_its_place(tmp_path):
    class Counter:
        at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    loader = Counter()
    loader.at = 3
    save(tmp_path, make_update(), number=1, loader=loader)
    other = Counter()
    resume(tmp_path, make_update(), loader=other)
    assert other.at == 3


def pairs_update(seed, *, learned=True):
    torch.manual_seed(seed)
    model, loss = nn.Linear(4, 3), clip_loss(temperature=0.5, learned=learned)
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.1)
    both = Coupled(lambda model, batch: (model(batch[0]), model(batch[1])), loss)
    return Update(model, optimizer, both, micro_batch=4), loss


def test_what_a_loss_has_learned_is_part_of_the_checkpoint(tmp_path):
    pairs = torch.randn(8, 4), torch.randn(8, 4)
    update, loss = pairs_update(0)
    for _ in range(3):
        update(pairs)
    save(tmp_path, update, number=3)
    update(pairs)
    other, other_loss = pairs_update(1)
    resume(tmp_path, other)
    other(pairs)
    assert_same_bits(weights(other), weights(update))
    for one, same in zip(other_loss.parameters(), loss.parameters(), strict=True):
        assert torch.equal(one, same)


def test_a_loss_that_learns_nothing_cannot_go_on_from_one_that_did(tmp_path):
    update, _ = pairs_update(0)
    save(tmp_path, update, number=0)
    with pytest.raises(CheckpointError, match=r"beside the model.*missing in this run"):
        resume(tmp_path, pairs_update(0, learned=False)[0])


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_a_number_that_no_checkpoint_would_be_found_by_is_refused(tmp_path, number):
    with pytest.raises(CheckpointError, match=f"number={number}"):
        save(tmp_path, make_update(), number=number)


def learning_update(monkeypatch):
    """Cut by a cost that was learnt from seven batches of a machine whose passes take as long as the square of their tokens."""
    torch.manual_seed(0)
    model = Dropping(lambda tokens: tokens**2)
    monkeypatch.setattr("anybatch.core.cutting.perf_counter", lambda: model.now)
    objective = Objective(lambda model, batch: read(model, batch).square().mean())
    split = Tokens(60, learn=7)
    return Update(model, torch.optim.SGD(model.parameters(), lr=0.5), objective, micro_batch=split), split


@pytest.mark.parametrize("forgets", [False, True], ids=["with what was learnt", "without"])
def test_a_run_that_learnt_its_costs_goes_on_with_the_same_cut(tmp_path, monkeypatch, forgets):
    straight, learnt = learning_update(monkeypatch)
    batches = [ragged() for _ in range(10)]
    for batch in batches[:7]:
        straight(batch)
    assert learnt.cost != Cost()
    assert learnt.learn is None, "it has learnt"
    save(tmp_path, straight, number=7)
    for batch in batches[7:]:
        straight(batch)
    other, split = learning_update(monkeypatch)
    if forgets:
        monkeypatch.setattr(Tokens, "load_state_dict", lambda self, state: None)
    resume(tmp_path, other)
    for batch in batches[7:]:
        other(batch)
    same = all(
        torch.equal(one, two) for one, two in zip(straight.model.parameters(), other.model.parameters(), strict=True)
    )
    assert same is not forgets
    assert (split.cost == learnt.cost) is not forgets
