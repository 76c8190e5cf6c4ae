"""Rules: pure functions from loops to findings."""

from anybatch.doctor.rules.models import loop_rules, model_rules
from anybatch.doctor.rules.orders import order_rules, row_rules, rules_across_ranks, sync_rules
from anybatch.doctor.rules.weights import logging_rules, lost_rules, weight_rules
