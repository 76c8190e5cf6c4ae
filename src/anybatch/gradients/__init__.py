"""The arithmetic of sums: shares, where gradients add up, the window, precision, norms."""

from anybatch.gradients.gradient_sum import GradientSum, all_finite
from anybatch.gradients.norm_and_clip import clip_to_norm, clip_to_value, gradient_norm
from anybatch.gradients.parameter_hooks import check_hooks
from anybatch.gradients.precision import cast_gradients, takes_fp32_gradients
from anybatch.gradients.shares import shares_of, weighted_sum
from anybatch.gradients.window import Window

__all__ = [
    "GradientSum",
    "Window",
    "all_finite",
    "cast_gradients",
    "check_hooks",
    "clip_to_norm",
    "clip_to_value",
    "gradient_norm",
    "shares_of",
    "takes_fp32_gradients",
    "weighted_sum",
]
