"""Lightning divides by the number of micro-batches; the targets are ragged."""

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
targets = torch.randint(0, 3, (200, 10))
for row, length in enumerate(torch.randint(1, 11, (200,)).tolist()):
    targets[row, length:] = -100
data = TensorDataset(torch.randn(200, 10, 8), targets)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu",
    max_steps=6,
    accumulate_grad_batches=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(data, batch_size=4))  # <- uneven-micro-batches
