"""anybatch: the loader yields the batch."""

from torch import nn
from torch.optim import Optimizer

from anybatch import Update
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def refuses(case: Case) -> str | None:
    return None


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    scheduler = case.scheduler(optimizer, case.num_updates)
    update = Update(
        model,
        optimizer,
        case.objective,
        micro_batch=case.micro_batch,
        clip_norm=case.clip_norm,
        scaler=case.scaler(),
        scheduler=scheduler,
        batch_norm="exact",
    )
    for _ in range(case.epochs):
        for batch in case.loader(case.batch):
            update(batch)
    return Learnt(scheduler=scheduler)
