"""The generator's backward leaves gradients in the critic."""

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

generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3)

for x, _ in list(loader)[:8]:
    opt_d.zero_grad()
    fake = generator(torch.randn(len(x), 4))
    F.binary_cross_entropy_with_logits(critic(x), torch.ones(len(x), 1)).backward()
    F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(len(x), 1)).backward()
    opt_d.step()
    opt_g.zero_grad()
    F.binary_cross_entropy_with_logits(critic(fake), torch.ones(len(x), 1)).backward()
    opt_g.step()
