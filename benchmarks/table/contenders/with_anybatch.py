"""anybatch: the loader yields the batch; over ranks, `GlobalBatches` deals each batch to them."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch import GlobalBatches, Update
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    wrapped, loader = model, case.loader(case.batch)
    if case.ranks > 1:
        torch.distributed.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
        loader = GlobalBatches(case.rows, case.batch, shuffle=False).loader(collate_fn=case.collate)
    scheduler = case.scheduler(optimizer, case.num_updates)
    update = Update(
        wrapped,
        optimizer,
        case.objective,
        micro_batch=case.micro_batch,
        clip_norm=case.clip_norm,
        scaler=case.scaler(),
        scheduler=scheduler,
        batch_norm="exact" if case.are_rows_coupled else None,
    )
    for _ in range(case.epochs):
        for batch in loader:
            update(batch)
    return Learnt(scheduler=scheduler)
