"""A batch that does not fit: `Fit` predicts what does, and `measure_peak` shows that it kept its word.

Data: scikit-learn's digits, widened by a large hidden layer.
"""

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
    print(
        f"all {planned.rows} rows at once: {planned.whole_bytes / 2**20:.0f} MiB; in {MEMORY}: {planned.micro_batch} at a time"
    )

    update = Update(model, optimizer, objective, micro_batch=Fit(MEMORY))
    update(batch)
    result, peak = measure_peak(update, batch)
    print(
        f"measured: {peak / 2**20:.1f} MiB in {result.micro_batches} micro-batches, loss {result.loss:.3f} over all rows"
    )
