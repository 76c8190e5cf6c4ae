"""The random numbers of one operation: where they are among its results, and other ones in their place."""

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from anybatch.torch_inside import op_name

_DROPOUT = torch.ops.aten.native_dropout.default


def drawn_by(func: Any, result: Any) -> Tensor | None:
    """The tensor of random numbers among the results; None for kernels that do not show it."""
    if func is _DROPOUT:
        return result[1]  # type: ignore[no-any-return]
    return result if isinstance(result, Tensor) and op_name(func) in _PURE else None


def put_numbers(func: Any, args: Any, result: Any, numbers: Tensor, taken: Tensor) -> None:
    """Let the operation have drawn `taken`."""
    numbers.copy_(taken)
    if func is _DROPOUT:
        torch.mul(args[0], numbers, out=result[0]).mul_(0.0 if args[1] == 1 else 1 / (1 - args[1]))


def mean_of(func: Any, args: Any, numbers: Tensor) -> Tensor:
    """What a draw would be if it were none: masks let everything through, noise is 0, orders are as they were."""
    name = op_name(func).removeprefix("aten::")
    if name == "randperm":
        return torch.arange(numbers.numel(), dtype=numbers.dtype, device=numbers.device)
    if name in ("bernoulli", "bernoulli_"):
        # dropout divides by the share that it keeps: filled with that share, it keeps everything as it is
        share = args[1] if name == "bernoulli_" and len(args) > 1 else 0.5
        if name == "bernoulli_" and numbers.is_floating_point():
            return torch.full_like(numbers, share) if not isinstance(share, Tensor) else share.expand_as(numbers)
        return torch.ones_like(numbers)
    if func is _DROPOUT:
        return torch.ones_like(numbers)
    fill = {"normal": 0.0, "normal_": 0.0, "randn": 0.0, "randn_like": 0.0}.get(name, 0.5)
    return torch.full_like(numbers, fill if numbers.is_floating_point() else 0)


_PURE = frozenset(
    f"aten::{name}"
    for name in [
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "random_",
        "uniform_",
        "_standard_gamma",
        "_sample_dirichlet",
    ]
)
"""Operations whose result is the draw itself."""


def generator_state(func: Any, args: Any, kwargs: Any) -> bytes:
    """Where the generator is that an operation draws from, in 16 bytes: its state takes 5,056, and each draw keeps one."""
    generator = kwargs.get("generator")
    if generator is None:
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        device = device or kwargs.get("device") or torch.device("cpu")
        device = torch.device(device)
        state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    else:
        state = generator.get_state()
    return blake2b(state.cpu().numpy().tobytes(), digest_size=16).digest()
