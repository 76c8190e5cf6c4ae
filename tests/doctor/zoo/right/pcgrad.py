"""Gradients of two tasks, projected by hand."""

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

for x, y in list(loader)[:8]:
    found = []
    for loss in (F.cross_entropy(model(x), y), model(x).square().mean()):
        optimizer.zero_grad()
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    optimizer.zero_grad()
    for p, one, other in zip(model.parameters(), *found):
        dot = (one * other).sum()
        if dot < 0:
            one = one - dot / other.square().sum() * other
        p.grad = one + other
    optimizer.step()
