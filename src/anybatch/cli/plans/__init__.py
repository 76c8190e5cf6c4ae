"""`anybatch plan`: of a task, of a config file, and for many ranks."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.cli.plans.asking import plan
    from anybatch.cli.plans.run_config_plan import config_plan_command
    from anybatch.cli.plans.run_plan import plan_command
    from anybatch.cli.plans.run_ranks_plan import ranks_plan_command
else:
    __getattr__ = lazily(__name__)

__all__ = ["config_plan_command", "plan", "plan_command", "ranks_plan_command"]
