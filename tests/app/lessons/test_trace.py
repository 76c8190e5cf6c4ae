import pytest
import torch
from torch import nn

from anybatch import supervised
from anybatch.app.lessons.update_trace import LARGEST, TIMED, image_of, trace, with_medians
from anybatch.app.records.schema import TracedStage
from anybatch.app.training.experiment import assemble
from anybatch.app.training.settings import Settings
from tests.app.training.small_tasks import small_task

SETTINGS = Settings(updates=2, warmup=0, decay="none")


def plain_task(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return small_task(model=model, optimizer=optimizer, objective=supervised(nn.CrossEntropyLoss()), **changes)


@pytest.fixture(scope="module")
def found():
    return trace(assemble(plain_task, SETTINGS))


def entries(found, stage):
    return [entry for entry in found.stages if entry.stage == stage]


def test_all_seven_stages_are_there_per_micro_batch_and_for_the_batch(found):
    assert {entry.stage for entry in found.stages} == {
        "load",
        "forward",
        "loss",
        "backward",
        "accumulate",
        "step",
        "zero",
    }
    for stage in ("load", "loss", "accumulate"):
        assert sorted(str(entry.micro_batch) for entry in entries(found, stage)) == ["0", "1", "2", "3", "None"]


def test_the_shares_add_up_to_the_batchs_loss(found):
    *parts, whole = entries(found, "loss")
    assert sum(entry.facts["share"] for entry in parts) == pytest.approx(1)
    added = sum(entry.facts["adds to the batch's loss"] for entry in parts)
    assert whole.facts["loss"] == pytest.approx(added)
    assert whole.facts["units"] == 16


def test_the_gradient_is_that_of_the_whole_batch_and_the_weights_moved_by_it(found):
    *parts, whole = entries(found, "accumulate")
    assert [entry.facts["gradient norm so far"] for entry in parts][-1] == pytest.approx(whole.facts["gradient norm"])
    before, after = entries(found, "step")
    for weight, moved, grad in zip(before.values, after.values, whole.values, strict=True):
        assert moved == pytest.approx(weight - 0.1 * grad)
    assert after.facts["change of all weights (norm)"] == pytest.approx(0.1 * whole.facts["gradient norm"])


def test_zeroing_leaves_no_gradient_and_comes_last(found):
    assert found.stages[-1].stage == "zero"
    assert found.stages[-1].facts["gradients left"] == 0


def test_clipping_shows_the_norm_before_and_after():
    settings = Settings(updates=2, warmup=0, decay="none", clip_norm=0.001)
    found = trace(assemble(plain_task, settings))
    (clip,), whole = entries(found, "clip"), entries(found, "accumulate")[-1]
    assert clip.facts["norm after"] == pytest.approx(0.001, rel=1e-2)
    assert clip.facts["norm before"] == whole.facts["gradient norm"] > 0.01
    shorter = clip.facts["norm after"] / clip.facts["norm before"]
    assert clip.values == pytest.approx([shorter * value for value in whole.values], rel=1e-3)


def test_backward_shows_the_gradient_of_its_own_micro_batch(found):
    parts = [entry.values for entry in entries(found, "backward")]
    whole = entries(found, "accumulate")[-1].values
    assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(list(whole), abs=1e-7)
    assert parts[0] != pytest.approx(list(whole))


def test_the_walk_of_the_sample_ends_in_a_prediction(found):
    *_, last, prediction = found.layers
    assert prediction.kind == "prediction"
    assert list(prediction.values) == pytest.approx(torch.tensor(last.values).softmax(0).tolist())
    guess = int(torch.tensor(last.values).argmax())
    assert prediction.name.startswith(f"class {guess} (")
    assert ", label " in prediction.name


def test_one_sample_goes_through_every_layer_with_its_shapes(found):
    layers = found.layers[:-1]  # the last is the prediction
    assert [(layer.name, layer.kind) for layer in layers] == [("0", "Linear"), ("1", "Tanh"), ("2", "Linear")]
    assert [layer.shapes_out for layer in layers] == [((1, 8),), ((1, 8),), ((1, 2),)]
    assert found.layers[0].shapes_in == ((1, 6),)
    hidden, squashed = found.layers[0].values, found.layers[1].values
    assert torch.tensor(hidden).tanh().tolist() == pytest.approx(list(squashed))


def test_a_module_that_calls_none_of_its_children_is_a_layer_itself():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, inputs):
            return nn.functional.linear(inputs, self.inner.weight)

    def build():
        model = Odd()
        return small_task(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            objective=supervised(nn.CrossEntropyLoss()),
        )

    assert [layer.kind for layer in trace(assemble(build, SETTINGS)).layers] == ["Odd", "prediction"]


def test_a_row_that_is_an_image_is_shown_from_its_lowest_number_in_black_to_its_highest_in_white():
    grey = torch.tensor([[-1.0, 0.0, 1.0, 0.0]] * 4).reshape(1, 1, 4, 4)
    found = image_of(grey)
    assert (found.width, found.height, found.channels) == (4, 4, 1)
    assert found.pixels == (0, 128, 255, 128) * 4
    assert image_of(torch.rand(1, 3, 300, 200)).pixels.__len__() == 3 * LARGEST * LARGEST


@pytest.mark.parametrize(
    "row", [torch.rand(1, 6), torch.rand(1, 5, 8, 8), torch.zeros(1, 1, 8, 8)], ids=lambda row: row.shape
)
def test_what_is_no_image_has_no_picture(row):
    assert image_of(row) is None


def test_the_times_shown_are_medians_of_several_updates_and_not_of_one():
    one = TracedStage(stage="loss", micro_batch=1, title="", facts={"seconds": 9.0, "loss": 1.0}, values=())
    other = TracedStage(stage="accumulate", micro_batch=None, title="", facts={"of": "x"}, values=())
    told, untold = with_medians([one, other], {("loss", 1): [0.1, 7.0, 0.2]})
    assert told.facts == {"seconds": 0.2, "loss": 1.0}
    assert untold == other
    assert TIMED >= 5


def test_every_time_of_the_trace_is_measured(found):
    assert all(entry.facts["seconds"] > 0 for entry in found.stages if entry.stage in ("forward", "backward"))
