"""One backward over the mean of several losses."""

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

batches = list(loader)[:12]
for start in range(0, 12, 4):
    losses = [F.cross_entropy(model(x), y) for x, y in batches[start : start + 4]]
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    optimizer.step()
