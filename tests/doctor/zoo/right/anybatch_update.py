"""The library itself."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anybatch

torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

update = anybatch.Update(model, optimizer, anybatch.supervised(nn.CrossEntropyLoss()), micro_batch=4)
for batch in list(loader)[:6]:
    update(batch)
