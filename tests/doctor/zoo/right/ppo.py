"""Several epochs over one rollout, in mini-batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for rollout in range(2):
    states = torch.randn(32, 8)
    with torch.no_grad():
        policy = torch.distributions.Categorical(logits=model(states))
        actions = policy.sample()
        old = policy.log_prob(actions)
    gains = torch.randn(32)
    for epoch in range(3):
        for rows in torch.randperm(32).split(8):
            ratio = (
                torch.distributions.Categorical(logits=model(states[rows])).log_prob(actions[rows]) - old[rows]
            ).exp()
            loss = -torch.min(ratio * gains[rows], ratio.clamp(0.8, 1.2) * gains[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
