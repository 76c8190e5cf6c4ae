"""The noise of the gradient: how far one batch's gradient is from all rows', measured by its micro-batches."""

from anybatch.noise.noise_history import NoiseHistory
from anybatch.noise.noise_scale import FEWEST_WINDOWS, NoiseScale, WindowNoise, noise_scale_of
from anybatch.noise.pass_norms import NormSums, NotMeasured, PassNorms

__all__ = [
    "FEWEST_WINDOWS",
    "NoiseHistory",
    "NoiseScale",
    "NormSums",
    "NotMeasured",
    "PassNorms",
    "WindowNoise",
    "noise_scale_of",
]
