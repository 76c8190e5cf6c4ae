"""What is wrong with a loop: one file for each family of rules, pure functions of what was seen."""

from anybatch.doctor.rules.model_rules import loop_rules, model_rules
from anybatch.doctor.rules.order_rules import order_rules
from anybatch.doctor.rules.rank_rules import rank_rules, row_rules
from anybatch.doctor.rules.tail_rules import lost_rules, tail_rules
from anybatch.doctor.rules.weight_rules import weight_rules

__all__ = [
    "loop_rules", "lost_rules", "model_rules", "order_rules", "rank_rules", "row_rules", "tail_rules", "weight_rules",
]  # fmt: skip
