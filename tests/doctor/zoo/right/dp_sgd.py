"""Clipped row by row into buffers."""

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

for x, y in list(loader)[:6]:
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for row, target in zip(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(row[None]), target[None]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for total, p in zip(sums, model.parameters()):
            total += p.grad
    for total, p in zip(sums, model.parameters()):
        p.grad = (total + 0.1 * torch.randn_like(total)) / len(x)
    optimizer.step()
