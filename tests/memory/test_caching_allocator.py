"""The caching allocator's rules, as torch documents them, and what they add to updates."""

import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anybatch import plan, supervised
from anybatch.memory.caching_allocator import MIB, CachingAllocator, SegmentPiece, reserved_for


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left of its segment is too little to cut off
        (84 * MIB, 84 * MIB, 84 * MIB),
        (514 * MIB, 514 * MIB, 514 * MIB),
    ],
)
def test_one_request(requested, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(requested)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_small_ones_share_segments_and_what_is_free_side_by_side_becomes_one():
    allocator = CachingAllocator()
    pieces = [allocator.allocate(512 * 1024) for _ in range(4)]
    assert allocator.reserved == 2 * MIB
    for piece in pieces[:2]:
        allocator.free(piece)
    allocator.allocate(MIB)
    assert allocator.reserved == 2 * MIB


def test_memory_in_pieces_that_are_not_side_by_side_is_no_room():
    allocator = CachingAllocator()
    pieces = [allocator.allocate(512 * 1024) for _ in range(4)]
    for piece in pieces[::2]:
        allocator.free(piece)
    allocator.allocate(MIB)
    assert allocator.reserved == 4 * MIB


def test_small_and_large_do_not_share():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(8 * MIB))
    allocator.allocate(1024)
    assert allocator.reserved == 22 * MIB


class Slow:
    """The same rules as lists of [start, size, is_free] that are searched from end to end."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int]]]] = []
        self.reserved = 0

    def allocate(self, nbytes: int) -> tuple[list[list[int]], list[int]]:
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= MIB
        free = [
            (piece[1], number, piece[0])
            for number, (kind, pieces) in enumerate(self.segments)
            if kind == small
            for piece in pieces
            if piece[2]
        ]
        fitting = [one for one in free if one[0] >= size]
        if fitting:
            _, number, start = min(fitting)
        else:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.segments.append((small, [[0, length, 1]]))
            self.reserved += length
            number, start = len(self.segments) - 1, 0
        pieces = self.segments[number][1]
        place = next(place for place, piece in enumerate(pieces) if piece[0] == start)
        piece = pieces[place]
        left = piece[1] - size
        if left >= 512 if small else left > MIB:
            pieces.insert(place + 1, [start + size, left, 1])
            piece[1] = size
        piece[2] = 0
        return pieces, piece

    def free(self, held: tuple[list[list[int]], list[int]]) -> None:
        pieces, piece = held
        piece[2] = 1
        merged: list[list[int]] = []
        for one in pieces:
            if merged and merged[-1][2] and one[2]:
                merged[-1][1] += one[1]
            else:
                merged.append(one)
        pieces[:] = merged


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_it_reserves_what_its_slow_twin_reserves(sizes: list[int], chance: random.Random):
    fast, slow = CachingAllocator(), Slow()
    held: list[tuple[SegmentPiece, object]] = []
    for size in sizes:
        nbytes = chance.choice([size * 700, size * 60_000, size * 500_000])
        held.append((fast.allocate(nbytes), slow.allocate(nbytes)))
        if chance.random() < 0.5:
            piece, twin = held.pop(chance.randrange(len(held)))
            fast.free(piece)
            slow.free(twin)
        assert fast.reserved == slow.reserved
    for piece, twin in held:
        fast.free(piece)
        slow.free(twin)
    assert fast.allocated == 0


def test_a_plan_for_a_gpu_states_what_the_allocator_adds():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4096, 256), torch.randn(4096, 256)
    found = plan(model, optimizer, supervised(nn.MSELoss()), batch, memory="40MiB", device="cuda")
    (note,) = [note for note in found.notes if "caching allocator" in note]
    added = float(re.search(r"by its rules ([\d.]+)% here", note)[1])
    assert 0 < added < 100
    on_host = plan(model, optimizer, supervised(nn.MSELoss()), batch, memory="40MiB")
    assert not [note for note in on_host.notes if "caching allocator" in note]


def test_a_trace_is_followed_by_key():
    seen = reserved_for([("a", 600), ("b", 3 * MIB), ("a", -600), ("c", 600), ("unknown", -5)])
    assert (seen.most_allocated, seen.reserved) == (1024 + 3 * MIB, 22 * MIB)
