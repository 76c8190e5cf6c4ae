"""The backward sits in a helper."""

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


def learn(x, y):
    loss = F.mse_loss(model(x), F.one_hot(y, 3).float())
    loss.backward()  # <- not-divided
    return loss.item()


for epoch in range(2):
    total, count = 0.0, 0
    for i, (x, y) in enumerate(loader):
        total += learn(x, y)
        count += 1
        if count == accumulation_steps or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            count = 0
