"""Mixed precision, clipping, warm-up and an exponential moving average of the weights (EMA), on handwritten digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, random_split

from anybatch import Update, supervised, warmup

EPOCHS, BATCH = 8, 128

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
training, validation = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])
loader = DataLoader(training, batch_size=BATCH, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.GELU(), nn.Flatten(),
    nn.Linear(32 * 4, 10),
)  # fmt: skip
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
update = Update(
    model,
    optimizer,
    supervised(nn.CrossEntropyLoss(label_smoothing=0.05)),
    micro_batch=32,
    autocast=torch.bfloat16,
    clip_norm=1.0,
    scheduler=warmup(optimizer, 10, updates=len(loader) * EPOCHS, decay="cosine"),  # steps once per batch
)


def accuracy(network: nn.Module) -> float:
    rows, labels = next(iter(DataLoader(validation, batch_size=len(validation))))
    with torch.no_grad():
        return float((network(rows).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    for epoch in range(1, EPOCHS + 1):
        for batch in loader:
            if update(batch).applied:  # skipped updates do not count for the average
                average.update_parameters(model)
        print(f"epoch {epoch}: accuracy {accuracy(model):.1%}, with averaged weights {accuracy(average):.1%}")
