"""Rules: pure functions from loops to findings."""

from anybatch.doctor.finding import Finding
from anybatch.doctor.loops import OptimizerRun, WatchedLoop
from anybatch.doctor.rules.models import loop_rules, model_rules
from anybatch.doctor.rules.orders import order_rules, row_rules, rules_across_ranks, sync_rules
from anybatch.doctor.rules.weights import logging_rules, lost_rules, weight_rules

OPTIMIZER_RULES = (weight_rules, order_rules, sync_rules, model_rules, logging_rules)


def findings_of(loop: WatchedLoop) -> list[Finding]:
    """Apply all rules on one process."""
    runs = [OptimizerRun(loop, optimizer) for optimizer in sorted(loop.optimizers) if loop.updates_of(optimizer)]
    found = [finding for run in runs for rule in OPTIMIZER_RULES for finding in rule(run)]
    if runs:
        found += [*lost_rules(loop, runs), *row_rules(loop, runs)]
    return [*found, *loop_rules(loop, runs)]
