"""transformers' Trainer takes **kwargs as a promise to divide."""

import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 8), torch.randint(0, 3, (200,)))
loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulation_steps = 4


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model

    def forward(self, x, labels=None, **kwargs):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, i):
        return {"x": data[i][0], "labels": data[i][1]}


folder = tempfile.mkdtemp()
options = TrainingArguments(
    folder,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    max_steps=4,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(Head(), options, train_dataset=Rows()).train()  # <- not-divided
