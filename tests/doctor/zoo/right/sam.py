"""The first gradient only says where to look."""

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
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
        for p, move in zip(model.parameters(), moves):
            p.add_(move)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
