"""One spawn of 2 ranks and one of 3 serve all tests of this folder."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.parallel import scenarios
from tests.parallel.ranks import outcomes


@pytest.fixture(scope="session", params=[2, 3], ids=["2 ranks", "3 ranks"])
def told(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """What a scenario left on each rank."""
    every = outcomes(scenarios.ALL, request.param)
    return lambda name: every[name]
