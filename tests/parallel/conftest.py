"""One spawn of 2 ranks serves nearly all tests of this folder, and one of 3 the rest."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.parallel import scenarios
from tests.parallel.ranks import outcomes


@pytest.fixture(scope="session")
def told() -> Callable[[str], list[Any]]:
    """What a scenario left on each of 2 ranks."""
    every = outcomes(scenarios.ALL, 2)
    return lambda name: every[name]


@pytest.fixture(scope="session")
def told_by_three() -> Callable[[str], list[Any]]:
    """What a scenario left on each of 3 ranks, whose rows are less even."""
    every = outcomes({name: scenarios.ALL[name] for name in scenarios.ON_THREE}, 3)
    return lambda name: every[name]
