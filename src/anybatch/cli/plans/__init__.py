"""`anybatch plan`: of a task, and of a config file."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.cli.plans.asking import plan
    from anybatch.cli.plans.run_config_plan import config_plan_command
    from anybatch.cli.plans.run_plan import plan_command
else:
    __getattr__ = lazily(__name__)

__all__ = ["config_plan_command", "plan", "plan_command"]
