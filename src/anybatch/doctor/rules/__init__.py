"""Rules: pure functions from loops to findings, one file for each family."""

from anybatch.doctor.rules.about_models import loop_rules, model_rules
from anybatch.doctor.rules.about_orders import order_rules, rank_rules, row_rules, rules_across
from anybatch.doctor.rules.about_weights import logging_rules, lost_rules, weight_rules
