"""Random masks by counting instead of drawing: each entry a hash of a key, its row and its place in the row.

Integer operations only, on the device and the same on every device: no generator, no state, no wait.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: what splitmix64 adds from one number to the next."""


def key_of(*numbers: int) -> int:
    """64 well-mixed bits of some whole numbers, whose order counts.

    >>> key_of(0, 1) != key_of(1, 0)
    True
    """
    key = 0
    for number in numbers:
        key = (key ^ number) + _STEP & _WORD
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _WORD
        key ^= key >> 31
    return key


def keep_mask(key: int, row_numbers: Tensor, shape: Sequence[int], keep: float) -> Tensor:
    """True with probability `keep`, to 32 bits, for each of `shape` entries of each row.

    An entry depends on the key, the number of its row and its coordinates within the row, not on how many rows there are nor on
    how long they were padded: of a longer row, the first part is the shorter one's.
    """
    if keep <= 0 or keep >= 1:
        return torch.full((len(row_numbers), *shape), keep >= 1, device=row_numbers.device)
    sizes = (len(row_numbers), *shape)
    first, second = (_per_row(key_of(key, half), row_numbers, len(sizes)) for half in (0, 1))
    bits = first
    for dim, size in enumerate(shape):
        bits = bits + _per_place(dim, size, len(shape), row_numbers.device)
    # a hash of 32 bits with few passes over them (lowbias32); the second key makes it one of 64 bits by row
    spare = torch.empty_like(bits)
    _fold(bits, 16, spare).mul_(0x7FEB352D).bitwise_xor_(second)
    _fold(bits, 15, spare).mul_(_signed(0x846CA68B))
    _fold(bits, 16, spare)
    return bits < _signed(round(keep * 2**32) + 2**31)


def _per_row(key: int, row_numbers: Tensor, dims: int) -> Tensor:
    return _scrambled(row_numbers, key).reshape(-1, *[1] * (dims - 1))


def _per_place(dim: int, size: int, dims: int, device: torch.device) -> Tensor:
    """A random number for each coordinate along one dim of a row; their sums tell places apart."""
    return _scrambled(torch.arange(size, device=device), key_of(dim)).reshape(-1, *[1] * (dims - 1 - dim))


def _scrambled(numbers: Tensor, key: int) -> Tensor:
    """32 bits of splitmix64 of each whole number."""
    bits = numbers.to(torch.int64) * _signed(_STEP, 64) + _signed(key, 64)
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * _signed(0xBF58476D1CE4E5B9, 64)
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * _signed(0x94D049BB133111EB, 64)
    return (bits >> 32).to(torch.int32)


def _fold(bits: Tensor, shift: int, spare: Tensor) -> Tensor:
    """bits ^= bits >> shift, the shift without the sign, in place."""
    torch.bitwise_right_shift(bits, shift, out=spare)
    return bits.bitwise_xor_(spare.bitwise_and_(2 ** (32 - shift) - 1))


def _signed(number: int, width: int = 32) -> int:
    """The number with these bits in two's complement."""
    number &= 2**width - 1
    return number - 2**width if number >= 2 ** (width - 1) else number
