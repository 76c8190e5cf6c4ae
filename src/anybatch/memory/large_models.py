"""Models too large to be built for planning alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_meta(beyond: int) -> Iterator[None]:
    """Inside this block, modules whose parameters come to more than `beyond` bytes have the rest of them without numbers.

    >>> with parameters_on_meta(beyond=100):
    ...     small, large = nn.Linear(2, 2), nn.Linear(100, 100)
    >>> small.weight.device.type, large.weight.device.type
    ('cpu', 'meta')
    """
    taken = 0

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal taken
        taken += 0 if parameter is None else parameter.nbytes
        if parameter is None or taken <= beyond:
            return None  # it stays as it is
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
