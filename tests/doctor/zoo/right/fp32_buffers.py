"""bf16 gradients added up in fp32 by hand."""

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

model = model.to(torch.bfloat16)
masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)
sums = [torch.zeros_like(m) for m in masters]
for i, (x, y) in enumerate(list(loader)[:12]):
    (F.cross_entropy(model(x.bfloat16()).float(), y) / accumulation_steps).backward()
    for total, p in zip(sums, model.parameters()):
        total += p.grad.float()
        p.grad = None
    if (i + 1) % accumulation_steps == 0:
        for m, total in zip(masters, sums):
            m.grad = total.clone()
            total.zero_()
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(masters, model.parameters()):
                p.copy_(m)
