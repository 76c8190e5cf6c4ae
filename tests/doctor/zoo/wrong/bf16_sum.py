"""Sixteen micro-batches in bf16."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulation_steps = 4

model = model.to(torch.bfloat16)
accumulation_steps = 16
for i, (x, y) in enumerate(list(data)[:64]):
    out = model(x[None].bfloat16())
    (F.cross_entropy(out.float(), y[None]) / accumulation_steps).backward()  # <- low-precision-sum
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
