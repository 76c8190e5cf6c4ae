"""A row that is an image, as the pixels that people see."""

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from anybatch.records import TracedImage

LARGEST = 64
"""Pixels of a side; larger images are made smaller."""


def image_of(row: Tensor) -> TracedImage | None:
    """The picture of a (1, channels, height, width) row with one channel or three; None where it is none.

    Its lowest number is black and its highest white, because nobody knows what the task has normalised.
    """
    if row.dim() != 4 or row.shape[1] not in (1, 3) or min(row.shape[2:]) < 4 or not row.is_floating_point():
        return None
    seen = row.detach().float().cpu()
    seen = adaptive_avg_pool2d(seen, (min(seen.shape[2], LARGEST), min(seen.shape[3], LARGEST)))[0]
    low, high = seen.min(), seen.max()
    if not bool((high - low).isfinite() & (high > low)):
        return None
    levels = ((seen - low) * (255 / (high - low))).round().int().permute(1, 2, 0)
    height, width, channels = levels.shape
    return TracedImage(width=width, height=height, channels=channels, pixels=tuple(levels.flatten().tolist()))
