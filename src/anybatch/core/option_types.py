"""What the options of an update may be: the types that every room may know."""

from typing import Literal

import torch

Autocast = torch.dtype | torch.autocast | None
"""A dtype to autocast to on the model's device, or an autocast context of the user's own; None for none."""

BatchNorm = Literal["exact", "micro", "frozen"]
"""What BatchNorm layers in training see: the whole batch, each micro-batch for itself, or their running statistics."""

Check = Literal["off", "first"]
"""What an update looks at before it learns from its first batch: nothing, or the losses of a few rows."""

Offload = Literal["auto", "host", "disk"] | None
"""Where saved tensors go: to `"host"` memory, to `"disk"`, `"auto"`: out once memory is half full; None: they stay."""

OnNonFinite = Literal["raise", "skip", "drop", "ignore"]
"""What an inf or nan in the gradient does to the update."""

OnEmpty = Literal["skip", "step"]
"""What a batch without any target is: no update, or one with a gradient of zeros, which decays weights and moves averages."""

Sums = Literal["fp32", "param", "auto"]
"""What gradients of bf16 and fp16 parameters are summed in: fp32, their own dtype, or that only where fp32 does not fit."""

Reduction = Literal["mean", "sum"]
"""How a loss puts its units together."""
