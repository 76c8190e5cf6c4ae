""""""

from anybatch.noise.noise_history import NoiseHistory
from anybatch.noise.noise_scale import NoiseScale, WindowNoise, noise_scale_of
