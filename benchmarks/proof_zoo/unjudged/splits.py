"""Splits that verify says it leaves alone: refused in its own words, or judged exact."""
import torch, torch.nn.functional as F
from torch import nn
from benchmarks.proof_zoo.zoo import unjudged, ce, mlp, obj
from anybatch import Rows


@unjudged("time_first_rows_dim_1", "sound, batch_dim=1", exact_ok=True)
def _():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 6), nn.Linear(6, 1)
        def forward(self, x):
            return self.head(self.rnn(x)[0][-1])[:, 0]
    return obj(M(), lambda m, b: (m(b["x"]) - b["y"]).square().mean(), {"x": torch.randn(7, 10, 4), "y": torch.randn(10)}, units=lambda b: len(b["y"]), micro_batch=Rows(3, batch_dim=1))


@unjudged("pairs_kept_together_by_groups", "sound, groups=", exact_ok=True)
def _():
    from anybatch import Stacked
    def loss(m, x):
        a, b = m(x).chunk(2)
        return -F.logsigmoid(a - b).mean()
    return obj(mlp(5, 8, 1), loss, torch.randn(12, 5), units=lambda x: len(x) // 2, micro_batch=Rows(4, groups=Stacked(2)))


@unjudged("ce_one_row", "sound, one row: no cut at all", exact_ok=True)
def _():
    return obj(mlp(), ce, (torch.randn(1, 5), torch.tensor([2])))
