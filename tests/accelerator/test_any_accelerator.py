"""What used to know CUDA only knows any accelerator that torch has."""

import torch

from anybatch import Update, verify
from anybatch.app.training.experiment import find_device
from anybatch.app.training.measure import with_memory
from anybatch.core.out_of_memory import free_on_device, with_peak
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import limit, plug
from tests.accelerator.setups import adamw, batch, cross_entropy, mlp


@on_device
def test_auto_is_the_accelerator_that_is_there():
    assert find_device("auto").type == "pretend"
    assert find_device("pretend:0") == plug()


@on_device
def test_the_memory_of_an_update_is_read_off_the_devices_counters():
    device = plug()
    model = mlp(width=256).to(device)
    update = Update(model, adamw(model.parameters()), cross_entropy(), micro_batch=8, check="off")
    update(batch())
    _, expected = with_peak(lambda: update(batch()), device)
    _, seen = with_memory(update, batch(), 1)
    assert abs(seen.peak_bytes - expected) <= 0.05 * expected
    assert 0 < max(point.bytes for point in seen.points) <= seen.peak_bytes


@on_device
def test_verify_measures_there_how_many_rows_fit():
    model = mlp(width=256).to(plug())
    verdict = verify(model, cross_entropy(), batch(), micro_batch=4, memory="200KB")
    assert verdict.is_exact
    assert verdict.rows < len(batch()[0])


@on_device
def test_free_is_what_nobody_uses():
    device = plug()
    before = torch.accelerator.memory_allocated(device)
    with limit(before + 5000):
        assert free_on_device(device) == 5000
