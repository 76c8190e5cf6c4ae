"""The noise of the gradient: how far one batch's gradient is from all rows', measured by its micro-batches."""

from anybatch.noise.noise_history import NOT_ASKED, NoiseHistory, NoiseRecord, noise_record
from anybatch.noise.noise_scale import FEWEST_WINDOWS, NoiseScale, WindowNoise, noise_scale_of
from anybatch.noise.pass_norms import ONE_MICRO_BATCH, UNMEASURED, NormSums, NotMeasured, PassMeter, PassNorms, Refused

__all__ = [
    "FEWEST_WINDOWS",
    "NOT_ASKED",
    "NoiseHistory",
    "NoiseRecord",
    "NoiseScale",
    "NormSums",
    "NotMeasured",
    "ONE_MICRO_BATCH",
    "PassMeter",
    "PassNorms",
    "Refused",
    "UNMEASURED",
    "WindowNoise",
    "noise_record",
    "noise_scale_of",
]
