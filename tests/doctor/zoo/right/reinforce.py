"""One loss over an episode."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for episode in range(6):
    logs, gains = [], []
    for t in range(10):
        policy = torch.distributions.Categorical(logits=model(torch.randn(1, 8)))
        action = policy.sample()
        logs.append(policy.log_prob(action))
        gains.append(float(action == 1))
    optimizer.zero_grad()
    loss = -(torch.cat(logs) * torch.tensor(gains)).sum()
    loss.backward()
    optimizer.step()
