"""A batch that does not fit into 24 MiB: `plan` predicts what fits, `Fit` trains with it, `measure_peak` measures it."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from anybatch import Fit, Update, measure_peak, plan, supervised

MEMORY = "24MiB"

torch.manual_seed(0)
digits = load_digits()
batch = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    objective = supervised(nn.CrossEntropyLoss())

    planned = plan(model, optimizer, objective, batch, memory=MEMORY)
    whole = planned.whole_bytes / 2**20
    print(
        f"predicted: {whole:.0f} MiB for {planned.rows} rows at once; {planned.micro_batch} rows at a time fit in {MEMORY}"
    )

    update = Update(model, optimizer, objective, micro_batch=Fit(MEMORY))
    update(batch)
    result, peak = measure_peak(update, batch)
    print(f"measured: {peak / 2**20:.1f} MiB with {result.micro_batches} micro-batches")
