"""The pretend accelerator is one: it refuses what a GPU refuses, is late where a GPU is late, and counts."""

import pytest
import torch
from torch import nn

from tests.accelerator import building
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import counted, limit, no_waits, plug, queued


@on_device
def test_a_tensor_of_the_host_is_refused_among_those_of_the_device():
    there = torch.zeros(3, device=plug())
    for wrong in (lambda: there + torch.zeros(3), lambda: nn.functional.mse_loss(there, torch.zeros(3))):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    assert (there + torch.tensor(2.0)).tolist() == [2.0] * 3, "a single number of the host is taken, as a GPU takes it"


@on_device
def test_memory_has_a_limit_and_is_counted_by_torchs_own_calls():
    device = plug()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    held = torch.empty(1000, device=device)
    del held
    assert torch.accelerator.max_memory_allocated(device) - before == 4000
    assert torch.accelerator.memory_allocated(device) == before
    with limit(before + 10_000):
        assert torch.accelerator.get_memory_info(device) == (10_000, before + 10_000)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 12000 bytes"):
            torch.empty(3000, device=device)


@on_device
def test_a_copy_from_pinned_memory_on_another_stream_is_late_unless_it_is_waited_for():
    device, host = plug(), torch.arange(4.0).pin_memory()
    side = torch.Stream(device)
    with side:
        early = host.to(device, non_blocking=True)
    assert (early + 0).isnan().all(), "nobody waited for the other stream"
    with side:
        late = host.to(device, non_blocking=True)
    torch.accelerator.current_stream().wait_stream(side)
    assert (late + 0).tolist() == [0.0, 1.0, 2.0, 3.0]
    with side:
        changed = host.to(device, non_blocking=True)
    host.fill_(7.0)
    torch.accelerator.current_stream().wait_stream(side)
    assert (changed + 0).tolist() == [7.0] * 4, "pinned memory is read when the copy runs"


@on_device
def test_a_copy_to_pinned_memory_is_not_seen_before_the_host_waits():
    there = torch.arange(4.0, device=plug())
    host = there.to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert host.isnan().all()
    there.fill_(9.0)
    event = torch.Event(there.device)
    event.record()
    event.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0], "it is what it was when it was the copy's turn"


@on_device
def test_the_same_stream_needs_no_wait():
    device = plug()
    host = torch.arange(4.0).pin_memory()
    back = host.to(device, non_blocking=True).mul_(2).to("cpu", non_blocking=True).to(device, non_blocking=True)
    assert back.tolist() == [0.0, 2.0, 4.0, 6.0]


@on_device
def test_waits_are_counted_and_refused():
    device = plug()
    there = torch.ones(4, device=device)
    waiting = {
        "item": lambda: there.sum().item(),
        "a copy to the host": lambda: there.cpu(),
        "a copy to the device": lambda: torch.tensor([1.0], device=device),
        "a mask": lambda: there[there > 0],
        "writing through a mask": lambda: torch.ops.aten.index_put_(there, [there > 0], there[:1]),
        "nonzero": lambda: there.nonzero(),
        "equal": lambda: torch.equal(there, there),
        "synchronize": lambda: torch.accelerator.synchronize(),
    }
    for name, action in waiting.items():
        before = counted()
        action()
        assert (counted() - before).waits == 1, name
        with no_waits(), pytest.raises(RuntimeError, match="where it may not"):
            action()
    with no_waits():
        there.add_(1).mul(2).sum()
        torch.tensor([1.0]).to(device, non_blocking=True)


@on_device
def test_memory_that_another_stream_uses_is_not_given_back_unsaid():
    device = plug()
    side = torch.Stream(device)

    def lost(is_said: bool) -> int:
        with side:
            made = torch.ones(8, device=device)
        torch.accelerator.current_stream().wait_stream(side)
        made + 1
        if is_said:
            made.record_stream(torch.accelerator.current_stream())
        before = counted()
        del made
        return (counted() - before).unsafe_frees

    assert lost(is_said=False) == 1
    assert lost(is_said=True) == 0


@on_device
def test_random_numbers_have_a_state_of_their_own():
    device = plug()
    module = torch.get_device_module(device)
    host, own = torch.get_rng_state(), module.get_rng_state()
    first = torch.rand(3, device=device)
    assert torch.equal(torch.get_rng_state(), host)
    module.set_rng_state(own)
    dropped = nn.functional.dropout(torch.ones(50, device=device))
    module.set_rng_state(own)
    assert torch.equal(nn.functional.dropout(torch.ones(50, device=device)), dropped)
    module.set_rng_state(own)
    assert torch.equal(torch.rand(3, device=device), first)
    assert torch.equal(torch.get_rng_state(), host)


@on_device
def test_autocast_casts_and_outputs_are_resized():
    device = plug()
    x = torch.ones(2, 3, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert nn.Linear(3, 4).to(device)(x).dtype is torch.bfloat16
        assert x.bfloat16().softmax(1).dtype is torch.float32
    out = torch.empty(0, device=device)
    assert torch.add(x, x, out=out).shape == out.shape == (2, 3)
    assert out.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@on_device
def test_optimizers_step_there_as_on_the_host(options):
    def stepped(device: torch.device) -> torch.Tensor:
        parameter = nn.Parameter(torch.linspace(-1, 1, 5).to(device))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)
        for _ in range(3):
            parameter.grad = parameter.detach() ** 2
            optimizer.step()
        return parameter.detach().cpu()

    assert torch.equal(stepped(plug()), stepped(torch.device("cpu")))


@on_device
def test_the_queue_is_written_down_in_order():
    device = plug()
    with queued() as log:
        torch.ones(2).pin_memory().to(device, non_blocking=True).mul_(2).sum().item()
    assert log == ["0 copy to device, 8 bytes", "0 aten::mul", "0 aten::sum", "0 item", "0 wait: item"]


def test_without_a_compiler_the_reason_and_the_cure_are_told(monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(building.NoCompilerError, match=r"no C\+\+ compiler is found .* apt-get install g\+\+"):
        building.compiler()


def test_other_sources_are_another_device(monkeypatch, tmp_path):
    (tmp_path / "one.cpp").write_text("int one;")
    before = building.library()
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    assert building.library() != before
