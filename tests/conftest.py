import gc
import os
from importlib.util import find_spec

import pytest
import torch

from tests.scheduling import is_long, scheduler, turn

# tests/core needs torch and pytest alone; the fixtures of pages need a browser, and load it when one is opened
pytest_plugins = ["tests.browsing"]

# nothing that a test writes has to outlive a power cut, and a busy disk takes 50 ms for each of thousands of files
os.fsync = lambda descriptor: None

# two workers on two cores: more threads than cores make tiny operations ten times slower
torch.set_num_threads(1)

collect_ignore = ["processes/loaded.py"]  # for the server of forks alone

if find_spec("hypothesis"):
    from hypothesis import settings

    # a shared machine may take any time over one example
    settings.register_profile("anybatch", deadline=None, max_examples=60)
    settings.load_profile("anybatch")


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Out of memory collects garbage, and so does the Trainer after a run: 0.6 s for the million objects that imports made."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files that take long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=[item for item in items if is_long(item.nodeid)])
        items[:] = [item for item in items if not is_long(item.nodeid)]
    items.sort(key=lambda item: turn(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    return scheduler(config, log)
