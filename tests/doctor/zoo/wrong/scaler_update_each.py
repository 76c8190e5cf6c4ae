"""The scale changes within an update."""

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
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for i, (x, y) in enumerate(list(loader)[:12]):
    scaler.scale(F.cross_entropy(model(x), y) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
    else:
        scaler.update(512.0 + i)  # <- scaler-misuse
