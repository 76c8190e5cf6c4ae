"""The loop that is taught: divide by N, step every N, zero. Over ranks with DDP, `no_sync` and a DistributedSampler."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    steps, wrapped, sampler = case.micro_batches, model, None
    if case.ranks > 1:
        torch.distributed.init_process_group("gloo")
        wrapped, sampler = DistributedDataParallel(model), DistributedSampler(case.rows, shuffle=False)
    scheduler, scaler = case.scheduler(optimizer, case.num_updates), case.scaler()
    for _ in range(case.epochs):
        for index, batch in enumerate(case.loader(case.micro_batch, sampler=sampler)):
            is_last = (index + 1) % steps == 0
            with wrapped.no_sync() if case.ranks > 1 and not is_last else nullcontext():
                loss = case.loss(wrapped, batch) / steps
                (loss if scaler is None else scaler.scale(loss)).backward()
            if not is_last:
                continue
            if scaler is not None:
                scaler.unscale_(optimizer)
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    return Learnt(scheduler=scheduler)
