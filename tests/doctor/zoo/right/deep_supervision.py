"""Losses at several depths in one backward."""

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

first, second = nn.Linear(8, 3), nn.Linear(3, 3)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for i, (x, y) in enumerate(list(loader)[:12]):
    early = first(x)
    late = second(early.relu())
    loss = F.cross_entropy(late, y) + 0.4 * F.cross_entropy(early, y)
    (loss / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
