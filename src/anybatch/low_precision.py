"""The dtypes whose sums lose digits."""

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
