import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> Iterator[None]:
    """The Trainer collects garbage after each run: of a million objects that imports made, which took 5/6 of a run's time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
