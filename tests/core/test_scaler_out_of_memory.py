"""Memory that runs out in the tail of an update: making the scaler, unscaling, clipping, the step, the scale."""

import copy

import pytest
import torch
from torch import nn

from anybatch import MemoryLimitError, Update, supervised
from tests.injection import OutOfMemoryAt


def start() -> tuple[Update, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].double()
    model[1].register_forward_hook(lambda module, inputs, output: output.double())
    update = Update(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        supervised(nn.CrossEntropyLoss()),
        micro_batch=4,
        clip_norm=0.1,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2),
        check="off",
    )
    return update, (torch.randn(4, 4), torch.randint(0, 3, (4,)))


def outcome(update: Update) -> list[torch.Tensor]:
    held = [value for state in update.optimizer.state.values() for value in state.values()]
    return [*update.model.state_dict().values(), *held, torch.tensor(update.scaler.get_scale())]


@pytest.mark.parametrize("num_before", [0, 2])
def test_one_out_of_memory_anywhere_ends_in_the_same_weights_state_and_scale_or_is_said_by_name(num_before):
    """Gradients of two dtypes are unscaled one after the other: half of them must not be unscaled twice."""
    update, batch = start()
    for _ in range(num_before):
        update(batch)
    with OutOfMemoryAt() as counting:
        update(batch)
    update(batch)
    expected = outcome(update)
    num_torn = num_given_again = 0
    for point in range(len(counting.seen)):
        update, batch = start()
        for _ in range(num_before):
            update(batch)
        before = outcome(update)
        said = ""
        try:
            with OutOfMemoryAt(point):
                update(batch)
        except MemoryLimitError as error:
            said = str(error)
        if "state is torn" in said:
            num_torn += 1
            continue
        if said:
            assert "while the gradients were" in said
            assert all(map(torch.equal, outcome(update), before))
            num_given_again += 1
            update(batch)
        update(batch)
        got = outcome(update)
        # a batch that starts again is cut smaller, and sums in another order
        is_close = [torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(got, expected, strict=True)]
        assert all(is_close), (point, counting.seen[point])
    assert num_given_again > 0
    assert (num_torn > 0) == (num_before == 2)


class SecondUnscaling(OutOfMemoryAt):
    """Memory runs out where the gradients of the first dtype are unscaled, and those of the second are not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += ["once"] if "unscale" in func.name() else []
        if len(self.seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def test_the_usual_order_unscales_half_of_the_gradients_twice():
    update, batch = start()
    update.scaler.scale(update.model(batch[0]).sum()).backward()
    before = [parameter.grad.clone() for parameter in update.model.parameters()]
    second = SecondUnscaling()
    with pytest.raises(torch.OutOfMemoryError), second:
        update.scaler.unscale_(update.optimizer)
    update.scaler.unscale_(update.optimizer)
    ratios = [(was / now.grad).nanmean().item() for was, now in zip(before, update.model.parameters(), strict=True)]
    assert max(ratios) > 2 * min(ratios)


def test_memory_that_never_suffices_to_unscale_is_said_by_name_and_nothing_was_changed():
    update, batch = start()
    update(batch)
    before = copy.deepcopy(update.model.state_dict())

    class NoUnscaling(OutOfMemoryAt):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "unscale" in func.name():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return func(*args, **(kwargs or {}))

    with (
        NoUnscaling(),
        pytest.raises(MemoryLimitError, match=r"while the gradients were unscaled .*as they were"),
    ):
        update(batch)
    assert all(torch.equal(before[name], value) for name, value in update.model.state_dict().items())
    assert update(batch).applied
