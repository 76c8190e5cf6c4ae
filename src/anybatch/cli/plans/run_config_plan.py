"""`anybatch plan --model`: a model that is only a config file."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anybatch.cli.plans.run_plan import Telling
from anybatch.errors import SettingsError
from anybatch.training import Settings

TOKENS = 2048


def config_plan_command(
    config: Path, options: dict[str, Any], settings: Settings, *, out: Path | None, is_json: bool, is_quiet: bool
) -> int:
    """Plan a language model that is not built, print, and leave a folder with a page; 1 where not even one row fits."""
    if find_spec("transformers") is None:
        raise SettingsError(
            f"--model {config} needs transformers. Install it with: pip install 'anybatch[huggingface]'"
        )
    telling = Telling(str(config), settings, out=out, is_json=is_json, is_quiet=is_quiet)
    # without a size it is this machine that is asked; a size without a device is that of a card
    is_card = settings.device == "auto" and options["memory"] is not None
    device = "cuda" if is_card else settings.device.replace("auto", "cpu")

    def make() -> Any:
        from anybatch.memory import plan_config  # torch is loaded from here on

        return plan_config(config, **{"tokens": TOKENS, **options}, device=device)

    return telling.tell(make)
