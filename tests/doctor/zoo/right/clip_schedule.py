"""Everything in its order."""

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

updates = -(-len(loader) // accumulation_steps)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * updates)

for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        n = min(accumulation_steps, len(loader) - i // accumulation_steps * accumulation_steps)
        (F.cross_entropy(model(x), y) / n).backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
