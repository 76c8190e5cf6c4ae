"""autograd.grad inside the loss."""

import torch
from torch import nn
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
    fake = generator(torch.randn(len(x), 4)).detach()
    between = (0.5 * (x + fake)).requires_grad_()
    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
    (critic(fake).mean() - critic(x).mean() + penalty).backward()
    opt_d.step()
    opt_g.zero_grad()
    (-critic(generator(torch.randn(len(x), 4))).mean()).backward()
    opt_g.step()
