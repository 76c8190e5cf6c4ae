"""The whole batch in one backward pass, in the model's own precision: the floor, on a machine that can hold it."""

from torch import nn
from torch.optim import Optimizer

from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    scheduler, scaler = case.scheduler(optimizer, case.num_updates), case.scaler()
    for _ in range(case.epochs):
        for batch in case.loader(case.batch):
            optimizer.zero_grad()
            loss = case.loss(model, batch)
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            is_applied = True
            if scaler is None:
                optimizer.step()
            else:
                before = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                is_applied = scaler.get_scale() >= before
            if scheduler is not None and is_applied:
                scheduler.step()
    return Learnt(scheduler=scheduler)
