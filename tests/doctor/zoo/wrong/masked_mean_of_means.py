"""The same with a mask made by hand."""

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

for epoch in range(2):
    for i, (x, y) in enumerate(list(loader)[:12]):
        mask = (y != -100).float()
        losses = F.cross_entropy(model(x).flatten(0, 1), y.clamp(min=0).flatten(), reduction="none").view_as(mask)
        loss = (losses * mask).sum() / mask.sum()
        (loss / accumulation_steps).backward()  # <- uneven-micro-batches
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
