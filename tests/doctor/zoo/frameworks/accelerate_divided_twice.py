"""Accelerate divides by the number of micro-batches, and so does the user."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y) / 4
            accelerator.backward(loss)  # <- divided-twice
            optimizer.step()
            optimizer.zero_grad()
