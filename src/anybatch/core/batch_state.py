"""What a batch changes in a model beside its gradient: put back where it teaches nothing, and told where it goes wrong."""

import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from anybatch.core.buffers import MovingBuffers
from anybatch.core.snapshot import Held, Slot, Snapshot
from anybatch.errors import levels_to_the_caller


class BatchState:
    """The buffers of one model and its loss, from batch to batch.

    `look_again()` is called where modules have other buffers than before: a BatchNorm was put in, say.
    """

    def __init__(self, modules: Sequence[nn.Module], look_again: Callable[[], None]) -> None:
        self._modules = modules
        self._look_again = look_again
        self._buffers = MovingBuffers(modules, aside=True)
        self._told: set[Slot] = set()
        self._num_told = -1

    def snapshot(self) -> Snapshot:
        """This moment, to go back to."""
        num_layouts = self._buffers.num_layouts
        before = self._buffers.snapshot()
        if self._buffers.num_layouts != num_layouts:
            self._look_again()
        return before

    def put_back(self, before: Snapshot) -> list[str]:
        """Make buffers and random draws what they were; the names of buffers of which there was no copy."""
        return self._buffers.put_back(before)

    def forget(self, buffers: Mapping[Slot, Held]) -> None:
        """Make buffers what they were before a batch that teaches nothing; random draws stay drawn."""
        lost = self.put_back(Snapshot(buffers=buffers))
        if lost:
            warnings.warn(
                f"this batch was not learnt from, but it was the first to change {', '.join(lost)}, of which there is no copy: "
                "what it left there stays. From now on copies are made.",
                stacklevel=levels_to_the_caller(),
            )

    def tell_moving(self, knows: Callable[[nn.Module, str], bool], num_passes: int, effect: Callable[[], str]) -> None:
        """Warn once of buffers that `num_passes` micro-batches moved one after the other, where nobody makes it right.

        `knows(module, name)` is True of buffers that advance once per batch; `effect()` says what the others do to the loss.
        Looked for after the first batch that is cut, and where more buffers move than before.
        """
        if self._num_told == self._buffers.num_moving:
            return
        moved = [slot for slot in self._buffers.moved() if slot not in self._told and not knows(*slot)]
        self._num_told = self._buffers.num_moving
        self._told.update(moved)
        if moved:
            warnings.warn(
                f"the forward changes buffers of its own ({self._names(moved)}): {num_passes} times in this batch, once per "
                f"micro-batch, where the whole batch would change them once.{effect()} verify(model, objective, batch) "
                "measures what that does to the gradient. Change them outside of forward, once per update.",
                stacklevel=levels_to_the_caller(),
            )

    def _names(self, slots: Sequence[Slot]) -> str:
        paths = {module: name for top in self._modules for name, module in top.named_modules()}
        names = [f"{paths.get(module, '')}.{buffer}".lstrip(".") for module, buffer in slots]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
