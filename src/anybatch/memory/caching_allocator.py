"""What a GPU's caching allocator takes from the device for what a program allocates: rounding, and memory left in pieces.

The rules are those of torch's CUDA allocator as it is set by default. A request is rounded up to 512 bytes. Up to 1 MiB it
comes out of segments of 2 MiB, below 10 MiB out of segments of 20 MiB, and what is larger has a segment of its own, a multiple
of 2 MiB. The smallest free piece that holds it is taken, and cut where enough is left over; pieces that are free side by side
become one. Segments stay with the allocator. Streams, which have pools of their own, and expandable segments are left out.
"""

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

MIB = 1 << 20
SMALLEST_PIECE = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_STEP = 2 * MIB, 20 * MIB, 2 * MIB
SMALLEST_ALONE = 10 * MIB


@dataclass(eq=False, slots=True)
class SegmentPiece:
    """A part of a segment, in use or free; `before` and `after` are its neighbours there."""

    size: int
    order: int
    """Where it lies: segments in the order in which they were taken, bytes within them."""
    is_small: bool
    is_free: bool = False
    before: "SegmentPiece | None" = None
    after: "SegmentPiece | None" = None


@dataclass(slots=True)
class CachingAllocator:
    """The allocator of one device, in bytes and without memory.

    >>> allocator = CachingAllocator()
    >>> piece = allocator.allocate(1)
    >>> allocator.allocated, allocator.reserved
    (512, 2097152)
    """

    allocated: int = 0
    reserved: int = 0
    most_allocated: int = 0
    most_reserved: int = 0
    _free: dict[bool, list[SegmentPiece]] = field(default_factory=lambda: {True: [], False: []})
    """By pool, small and large; the smallest first, of equal ones the first in memory."""

    def allocate(self, nbytes: int) -> SegmentPiece:
        """A piece of at least so many bytes, from the cache or from the device."""
        size = max(_rounded(nbytes, SMALLEST_PIECE), SMALLEST_PIECE)
        piece = self._cut(self._cached(size) or self._segment(size), size)
        self.allocated += piece.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return piece

    def free(self, piece: SegmentPiece) -> None:
        """Give a piece back to the cache, as one with its free neighbours."""
        self.allocated -= piece.size
        for other in (piece.before, piece.after):
            if other is not None and other.is_free:
                self._free[other.is_small].remove(other)
                piece = _joined(*sorted((piece, other), key=lambda one: one.order))
        self._put(piece)

    def _cached(self, size: int) -> SegmentPiece | None:
        pool = self._free[size <= LARGEST_SMALL]
        place = bisect.bisect_left(pool, size, key=lambda piece: piece.size)
        if place == len(pool):
            return None
        piece = pool.pop(place)
        piece.is_free = False
        return piece

    def _segment(self, size: int) -> SegmentPiece:
        if size <= LARGEST_SMALL:
            length = SMALL_SEGMENT
        else:
            length = LARGE_SEGMENT if size < SMALLEST_ALONE else _rounded(size, SEGMENT_STEP)
        piece = SegmentPiece(length, self.reserved, is_small=size <= LARGEST_SMALL)
        self.reserved += length
        self.most_reserved = max(self.most_reserved, self.reserved)
        return piece

    def _cut(self, piece: SegmentPiece, size: int) -> SegmentPiece:
        left = piece.size - size
        if left < SMALLEST_PIECE if piece.is_small else left <= LARGEST_SMALL:
            return piece
        rest = SegmentPiece(left, piece.order + size, piece.is_small, before=piece, after=piece.after)
        if rest.after is not None:
            rest.after.before = rest
        piece.size, piece.after = size, rest
        self._put(rest)
        return piece

    def _put(self, piece: SegmentPiece) -> None:
        piece.is_free = True
        bisect.insort(self._free[piece.is_small], piece, key=lambda one: (one.size, one.order))


def reserved_for(changes: Iterable[tuple[Hashable, int]]) -> CachingAllocator:
    """The allocator after (key, bytes) in order: more than 0 bytes are allocated under this key, less are freed."""
    allocator = CachingAllocator()
    held: dict[Hashable, SegmentPiece] = {}
    for key, nbytes in changes:
        if nbytes > 0:
            held[key] = allocator.allocate(nbytes)
        elif key in held:
            allocator.free(held.pop(key))
    return allocator


def _joined(first: SegmentPiece, second: SegmentPiece) -> SegmentPiece:
    first.size += second.size
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


def _rounded(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
