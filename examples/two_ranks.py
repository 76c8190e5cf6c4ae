"""Two ranks, one batch: run with `torchrun --nproc-per-node 2 examples/two_ranks.py`. The weights are those of one process.

`GlobalBatches` deals each batch of 64 rows to the ranks, the tail too: no row twice, none left out.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from anybatch import GlobalBatches, Update, supervised

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs, targets = (torch.tensor(values) for values in load_breast_cancer(return_X_y=True))
    data = TensorDataset(((inputs - inputs.mean(0)) / inputs.std(0)).float(), targets.long())

    model = DistributedDataParallel(nn.Linear(30, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=16)
    total = 0
    for dealt in GlobalBatches(data, 64).loader():
        result = update(dealt)
        total += int(result.units)
    if dist.get_rank() == 0:
        print(f"{total} rows on {dist.get_world_size()} ranks, last loss {result.loss:.4f} over {result.units} rows")
    dist.destroy_process_group()
