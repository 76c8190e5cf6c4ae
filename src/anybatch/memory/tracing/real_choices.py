"""What a library decides by whether tensors are fake, decided as in a real run."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from anybatch.batches import Batch

_MODULE, _NAME = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def choosing_as_real(micro_batches: Iterable[Batch]) -> Iterator[None]:
    """Inside this block transformers leaves the mask of attention out where a real run would.

    Positions that a model counts itself are those of one sequence a row. A real run reads that off their numbers, and needs no
    mask; fake tensors are not asked: a mask is made, and keys and values are repeated to go with it. Batches that bring
    positions are planned with the mask: an upper bound.
    """
    masking = sys.modules.get(_MODULE)
    own = getattr(masking, _NAME, None)
    brings_none = all(isinstance(one, Mapping) and "position_ids" not in one for one in micro_batches)
    if own is None or not brings_none:
        yield
        return
    setattr(masking, _NAME, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking, _NAME, own)
