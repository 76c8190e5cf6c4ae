"""NumPy: its arrays and numbers in a batch, and its random state, which is kept and put back as Python's is."""

import io
import random

import numpy
import torch

from anybatch import Rows, take_rows
from anybatch.core import OuterRandom, outer_random
from anybatch.core.splits import as_split


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(numpy.random.randn())


def test_draws_are_repeated_after_restore():
    numpy.random.randn()  # the second of a pair is kept, and is part of the state
    before = outer_random()
    first = draws()
    assert draws() != first
    before.restore()
    assert draws() == first


def test_moved_names_the_generator_that_was_drawn_from():
    before = outer_random()
    assert before.moved() == []
    random.random()
    assert before.moved() == ["random"]
    numpy.random.rand(700)  # more than it makes at a time
    assert before.moved() == ["random", "numpy.random"]


def test_the_state_survives_a_file_that_runs_no_code():
    before = outer_random()
    file = io.BytesIO()
    torch.save({"torch": torch.get_rng_state(), **before.as_values()}, file)
    first = draws()
    file.seek(0)
    OuterRandom.of_values(torch.load(file, weights_only=True)).restore()
    assert draws() == first
    assert OuterRandom.of_values(before.as_values()) == before


def test_numpy_arrays_and_0_dim_tensors():
    batch = (torch.zeros(3, 1), numpy.arange(3), torch.tensor(2.0))
    taken = take_rows(batch, [2, 0])
    assert taken[1].tolist() == [2, 0]
    assert taken[2] is batch[2]


def test_an_int_of_numpy_stands_for_rows():
    assert as_split(numpy.int64(16)) == Rows(16)
