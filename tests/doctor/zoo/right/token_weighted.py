"""A sum over tokens, divided by all tokens of the update."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
targets = torch.randint(0, 3, (200, 10))
for row, length in enumerate(torch.randint(1, 11, (200,)).tolist()):
    targets[row, length:] = -100
data = TensorDataset(torch.randn(200, 10, 8), targets)
loader = DataLoader(data, batch_size=2, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulation_steps = 4

batches = list(loader)[:12]
for start in range(0, 12, accumulation_steps):
    group = batches[start : start + accumulation_steps]
    tokens = sum((y != -100).sum() for _, y in group)
    for x, y in group:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        (loss / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
