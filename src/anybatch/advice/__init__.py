"""Whether a batch is worth it: what a larger or a smaller one would bring, from the noise of the gradient."""

from typing import TYPE_CHECKING

from anybatch.lazy import lazily

if TYPE_CHECKING:
    from anybatch.advice.advising import advise, advise_run
    from anybatch.advice.tradeoff import FACTOR, Tradeoff
    from anybatch.advice.trial_run import TaskTrial, try_task
else:
    __getattr__ = lazily(__name__)

__all__ = [
    "FACTOR",
    "TaskTrial",
    "Tradeoff",
    "advise",
    "advise_run",
    "try_task",
]
