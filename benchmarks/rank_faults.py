"""What may go wrong on one rank, planted into a forked process before its run begins: four kinds, at each stage."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

KINDS = ("killed", "hangs", "raises", "out of memory")


def fail(kind: str) -> None:
    """Go wrong."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        time.sleep(1e6)
    import torch

    raise torch.OutOfMemoryError("provoked") if kind == "out of memory" else RuntimeError("provoked")


def _before(holder: Any, name: str, kind: str, *, skip: int = 0) -> None:
    """Fail instead of the call after the first `skip` of them."""
    act, calls = getattr(holder, name), [0]

    def acting(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > skip:
            fail(kind)
        return act(*arguments, **options)

    setattr(holder, name, acting)


def _in_building(kind: str) -> None:
    from anybatch.training import experiment

    _before(experiment, "spread_over_ranks", kind)


def _in_first_forward(kind: str) -> None:
    import torch

    _before(torch.nn.Linear, "forward", kind)


def _in_last_backward(kind: str) -> None:
    """In the backward of the second micro-batch of the third update, which the ranks synchronise."""
    import torch

    act, calls = torch.autograd.graph._engine_run_backward, [0]
    from anybatch.gradients import gradient_sum

    def run_engine(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            fail(kind)
        return act(*arguments, **options)

    gradient_sum.run_engine = run_engine  # type: ignore[attr-defined]


def _in_step(kind: str) -> None:
    from anybatch.update.stepping import Stepping

    _before(Stepping, "step", kind, skip=4)


def _in_validation(kind: str) -> None:
    from anybatch.training import loop

    _before(loop, "validate", kind)


def _in_checkpoint(kind: str) -> None:
    from anybatch.training.checkpoints import checkpoint_files

    _before(checkpoint_files, "_write_values", kind, skip=1)


def _between_updates(kind: str) -> None:
    from anybatch.training.loop import Loop

    _before(Loop, "_agree", kind, skip=4)


STAGES: dict[str, Callable[[str], None]] = {
    "building": _in_building,
    "first forward": _in_first_forward,
    "last backward": _in_last_backward,
    "step": _in_step,
    "between updates": _between_updates,
    "validation": _in_validation,
    "checkpoint": _in_checkpoint,
}
