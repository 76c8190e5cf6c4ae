"""A loss per head on one line."""

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

trunk = nn.Linear(8, 16)
heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(3))
optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
for x, y in list(loader)[:8]:
    optimizer.zero_grad()
    for head in heads:
        F.cross_entropy(head(trunk(x)), y).backward()
    optimizer.step()
