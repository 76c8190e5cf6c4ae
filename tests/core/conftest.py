"""Fixtures of all tests of the core."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def collect_new_objects_only() -> Iterator[None]:
    """Keep the objects of torch and pytest out of garbage collections: each retry runs one, over 100 ms with them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
