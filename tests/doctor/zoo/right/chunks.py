"""A batch cut by hand into unequal parts, each with its share."""

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

for x, y in DataLoader(data, batch_size=40):
    for part, target in zip(x.split(16), y.split(16)):
        (F.cross_entropy(model(part), target) * len(part) / len(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
