"""A contrastive loss under accumulation."""

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

other = nn.Linear(8, 3)
optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()], lr=0.01)
for i, (x, _) in enumerate(list(loader)[:12]):
    logits = F.normalize(model(x), dim=1) @ F.normalize(other(x), dim=1).T / 0.1
    (F.cross_entropy(logits, torch.arange(len(x))) / accumulation_steps).backward()  # <- negatives-missing
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
