"""A script as torchrun starts it on each of two nodes: 33 rows in batches of 12, no row twice, none lost."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch import GlobalBatches, Update, supervised


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = list(zip(torch.randn(33, 6), torch.randint(0, 3, (33,)), strict=True))
    model = DistributedDataParallel(nn.Linear(6, 3))
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), micro_batch=4
    )
    for batch in GlobalBatches(rows, 12, shuffle=False).loader():
        update(batch)
    torch.save([parameter.detach() for parameter in model.parameters()], f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
