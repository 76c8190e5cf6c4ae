"""Running a forward again exactly as it ran the first time: random draws and the model's own state."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

Slot = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


@dataclass(frozen=True, slots=True)
class RandomState:
    """Torch's generators, of the CPU and of accelerators, at one moment."""

    cpu: Tensor
    accelerators: tuple[tuple[torch.device, Tensor], ...]

    def restore(self) -> None:
        """Draw from here again."""
        torch.set_rng_state(self.cpu)
        for device, state in self.accelerators:
            torch.get_device_module(device).set_rng_state(state, device)

    def is_now(self) -> bool:
        """True if nothing was drawn since."""
        with _disable_current_modes():  # the states are real, also where a mode fakes the model's tensors
            now = random_state(device for device, _ in self.accelerators)
            pairs = zip(self.accelerators, now.accelerators, strict=True)
            return torch.equal(self.cpu, now.cpu) and all(torch.equal(mine, other) for (_, mine), (_, other) in pairs)


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """The state of the CPU's generator and of those of `devices`."""
    accelerators = sorted({device for device in devices if device.type not in ("cpu", "meta")}, key=str)
    states = tuple((device, torch.get_device_module(device).get_rng_state(device)) for device in accelerators)
    return RandomState(torch.get_rng_state(), states)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a forward depends on beside parameters and rows: where the generators and the buffers stood before it."""

    random: RandomState
    buffers: Mapping[Slot, tuple[Tensor, Tensor]]
    """The tensor that was in the slot, and a copy of what it held."""


class Replay:
    """Moments of one model: taken before its forwards, and gone back to.

    Buffers are copied whole at the first moment, and from then on only those that forwards were seen to change (running
    statistics, power iterations, moving averages), be it in place or by assignment. State that is neither a buffer nor
    torch's random state is out of sight.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        self._first = self._copy(self._slots())
        self._versions = {slot: tensor._version for slot, (tensor, _) in self._first.items()}

    def now(self) -> Moment:
        """This moment, to go back to."""
        return Moment(random_state(self._devices), self._copy(self._moving()))

    def go_back(self, moment: Moment) -> None:
        """Make generators and buffers what they were at `moment`."""
        moment.random.restore()
        for slot in self._moving():
            tensor, copy = moment.buffers.get(slot) or self._first[slot]
            module, name = slot
            module._buffers[name] = tensor
            # .data: what a graph has saved of this buffer is not to be called modified, it is what it was
            tensor.data.copy_(copy)

    def _slots(self) -> list[Slot]:
        return [
            (module, name)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _moving(self) -> list[Slot]:
        """Slots whose tensor was replaced or written to; BatchNorm writes without telling torch's version counter."""
        return [slot for slot, (tensor, _) in self._first.items() if self._has_moved(slot, tensor)]

    def _has_moved(self, slot: Slot, tensor: Tensor) -> bool:
        module, name = slot
        held = module._buffers[name]
        return isinstance(module, _NormBase) or held is not tensor or tensor._version != self._versions[slot]

    @staticmethod
    def _copy(slots: Iterable[Slot]) -> dict[Slot, tuple[Tensor, Tensor]]:
        copies = {}
        for module, name in slots:
            tensor = module._buffers[name]
            if tensor is not None:
                copies[module, name] = (tensor, tensor.detach().clone())
        return copies
