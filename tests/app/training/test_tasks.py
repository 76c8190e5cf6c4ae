import pytest
import torch
from sklearn.datasets import load_digits

from anybatch import TaskError
from anybatch.app.records.schema import UpdateDone
from anybatch.app.training.experiment import assemble
from anybatch.app.training.loop import Loop
from anybatch.app.training.settings import Settings
from anybatch.app.training.tasks import stdlib
from anybatch.app.training.tasks.lookup import BUILT_IN, find_task
from tests.app.training.small_tasks import small_task
from tests.processes.forked import run_code


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_task_learns_and_the_same_seed_makes_the_same_weights(name):
    experiment = assemble(find_task(name), Settings(seed=3, updates=3, batch_size=12, micro_batch=4))
    again = assemble(find_task(name), Settings(seed=3, updates=3))
    other = assemble(find_task(name), Settings(seed=4, updates=3))
    first = [parameter.detach().clone() for parameter in experiment.task.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(first, again.task.model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other.task.model.parameters(), strict=True))
    told = []
    small = [experiment.task.validation[number] for number in range(20)]
    object.__setattr__(experiment.task, "validation", small)
    Loop(experiment, tell=told.append).run()
    losses = [record.loss for record in told if isinstance(record, UpdateDone)]
    assert len(losses) == 3
    assert all(0 < loss < 20 for loss in losses)
    assert not torch.equal(first[0], next(experiment.task.model.parameters()))


def test_textbook_is_the_one_of_the_textbooks():
    task = find_task("textbook")()
    assert len(task.training) == 1000
    assert task.training[0][0].shape == (10,)
    assert (task.batch_size, task.micro_batch, task.epochs) == (64, 16, 10)
    assert task.optimizer.param_groups[0]["lr"] == 0.1


def test_digits_are_scikit_learns_which_is_not_imported_for_them():
    pixels, labels = load_digits(return_X_y=True)
    task = find_task("digits")()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(1)).tolist()
    for part, rows in ((task.training, order[:1437]), (task.validation, order[1437:])):
        assert part.tensors[0].tolist() == (pixels[rows].reshape(-1, 1, 8, 8) / 16).tolist()
        assert part.tensors[1].tolist() == labels[rows].tolist()
    done = run_code(
        "import sys; from anybatch.app.training.tasks.lookup import find_task; find_task('digits')(); print(*sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    assert "sklearn" not in done.stdout.split()


def test_the_standard_librarys_functions_are_many_and_ragged():
    found = stdlib.functions()
    lengths = sorted(len(function.source) for function in found)
    assert len(found) > 3000
    assert lengths[len(lengths) * 9 // 10] > 4 * lengths[len(lengths) // 2] / 2
    assert any(function.docstring and function.body for function in found)
    assert all(function.docstring.strip() not in function.body for function in found if len(function.docstring) > 60)


def test_padding_is_neither_counted_nor_predicted():
    inputs, targets = stdlib.pad([torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6])])
    assert targets.tolist() == [[2, 3, 4], [6, -100, -100]]
    assert inputs.shape == targets.shape
    assert int(stdlib.predicted_bytes((inputs, targets))) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "net"}, r"Task\(model=...\) got a str: 'net'; expected a Module"),
        ({"training": iter([1])}, "expected a dataset with len"),
        ({"validation": []}, "0 rows"),
        ({"batch_size": 0}, r"Task\(batch_size=0\)"),
        ({"decay": "step"}, "decay='step'"),
    ],
)
def test_a_task_of_parts_that_do_not_fit_names_the_part(changes, message):
    with pytest.raises(TaskError, match=message):
        small_task(**changes)


def test_an_unknown_task_is_told_which_there_are():
    with pytest.raises(TaskError, match=r"no task 'digit'. Built in are textbook, digits, stdlib, pairs"):
        find_task("digit")


def test_a_task_file_is_found_and_one_without_task_is_named(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    with pytest.raises(TaskError, match=r"mine.py has no function task\(\)"):
        find_task(str(path))
    path.write_text("def task():\n    return 3\n")
    with pytest.raises(TaskError, match=r"returned a int; expected an anybatch.Task"):
        find_task(str(path))()
