"""Results as pictures, each with its table."""

from anybatch.report.charts.chart import Chart, Table
from anybatch.report.charts.comparison_charts import charts_of_comparison, final_table, num_seeds
from anybatch.report.charts.proof_charts import (
    RowCells,
    charts_of_proof,
    charts_of_trace,
    cuts_table,
    finding_of,
    largest_error,
    proof_sentence,
    row_cells,
    shares_picture,
    weights_picture,
    written_precision,
)
from anybatch.report.charts.training_charts import (
    charts_of_plan,
    epoch_charts,
    memory_charts,
    noise_charts,
    rate_and_norm_charts,
    stage_colour,
    timeline_chart,
    update_charts,
)

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
