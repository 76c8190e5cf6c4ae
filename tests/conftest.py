import pytest
import torch
from hypothesis import settings

# two workers on two cores: more threads than cores make tiny operations ten times slower
torch.set_num_threads(1)

# a shared machine may take any time over one example
settings.register_profile("anybatch", deadline=None, max_examples=60)
settings.load_profile("anybatch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.scheduling import turn

    items.sort(key=lambda item: turn(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.scheduling import ByUnit

    return ByUnit(config, log)
