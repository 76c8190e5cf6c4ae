"""A teacher, a temperature, two weights."""

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

teacher = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
for i, (x, y) in enumerate(list(loader)[:12]):
    with torch.no_grad():
        soft = F.softmax(teacher(x) / 2, dim=1)
    out = model(x)
    student = F.log_softmax(out / 2, dim=1)
    loss = 0.5 * F.cross_entropy(out, y) + 0.5 * 4 * F.kl_div(student, soft, reduction="batchmean")
    (loss / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
