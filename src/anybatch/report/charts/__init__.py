"""Results as pictures, each with its table."""

from anybatch.report.charts.chart import Chart, Table
from anybatch.report.charts.comparison_charts import comparison_charts, final_table, num_seeds
from anybatch.report.charts.peak_charts import plan_charts
from anybatch.report.charts.proof_charts import (
    cuts_table,
    largest_error,
    proof_charts,
    proof_sentence,
    written_precision,
)
from anybatch.report.charts.trace_charts import trace_charts
from anybatch.report.charts.training_charts import epoch_charts, rate_and_norm_charts, update_charts
from anybatch.report.charts.window_charts import memory_charts, stage_colour, timeline_chart

__all__ = [
    "Chart",
    "Table",
    "comparison_charts",
    "rate_and_norm_charts",
    "cuts_table",
    "epoch_charts",
    "final_table",
    "largest_error",
    "memory_charts",
    "num_seeds",
    "plan_charts",
    "proof_charts",
    "proof_sentence",
    "stage_colour",
    "timeline_chart",
    "trace_charts",
    "update_charts",
    "written_precision",
]
