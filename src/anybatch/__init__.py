"""Train with the batch you want, on the memory you have, and get exactly that batch's gradient.

The public names live in `anybatch.api` and are loaded when the first of them is asked for, so that the command line can
answer `--help` without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybatch.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    api = import_module("anybatch.api")
    try:
        return getattr(api, name)
    except AttributeError:
        raise AttributeError(f"anybatch has no {name!r}; it has {', '.join(api.__all__)}.") from None


def __dir__() -> list[str]:
    api = import_module("anybatch.api")
    return sorted([*api.__all__, "__version__"])
