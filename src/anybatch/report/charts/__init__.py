"""Results as pictures, each with its table."""

from anybatch.report.charts.cell_pictures import RowCells, row_cells, shares_picture
from anybatch.report.charts.chart import Chart, Table
from anybatch.report.charts.comparison_charts import charts_of_comparison, final_table, num_seeds
from anybatch.report.charts.peak_charts import charts_of_plan
from anybatch.report.charts.proof_charts import (
    charts_of_proof,
    cuts_table,
    finding_of,
    largest_error,
    proof_sentence,
    weights_picture,
    written_precision,
)
from anybatch.report.charts.trace_charts import charts_of_trace
from anybatch.report.charts.training_charts import epoch_charts, noise_charts, rate_and_norm_charts, update_charts
from anybatch.report.charts.window_charts import memory_charts, stage_colour, timeline_chart

__all__ = [
    "Chart",
    "RowCells",
    "Table",
    "charts_of_comparison",
    "charts_of_plan",
    "charts_of_proof",
    "charts_of_trace",
    "cuts_table",
    "epoch_charts",
    "final_table",
    "finding_of",
    "largest_error",
    "memory_charts",
    "noise_charts",
    "num_seeds",
    "proof_sentence",
    "rate_and_norm_charts",
    "row_cells",
    "shares_picture",
    "stage_colour",
    "timeline_chart",
    "update_charts",
    "weights_picture",
    "written_precision",
]
