"""Train with the batch you want, on the memory you have, and get exactly that batch's gradient.

The public names are listed in `anybatch.api`, and each is loaded when it is first asked for, so that the command line can
answer `--help` without loading torch.
"""

from typing import TYPE_CHECKING, Any

from anybatch.lazy import homes, lazily

if TYPE_CHECKING:
    from anybatch.api import *  # noqa: F403

__version__ = "0.2.0"

_load = lazily(__name__, listed_in="anybatch.api")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return sorted(homes("anybatch.api")) if name == "__all__" else _load(name)


def __dir__() -> list[str]:
    return sorted([*homes("anybatch.api"), "__version__"])
