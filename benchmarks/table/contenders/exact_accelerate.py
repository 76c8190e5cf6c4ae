"""Accelerate with an Update of what it prepared."""

import accelerate
from torch import nn
from torch.optim import Optimizer

from anybatch.integrations.accelerate import global_loader, prepared_update
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    # mixed_precision="fp16" makes no scaler on the CPU; this is where it would be
    accelerator.scaler = case.scaler()
    scheduler = case.scheduler(optimizer, case.num_updates)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    update = prepared_update(
        accelerator,
        wrapped,
        prepared,
        case.objective,
        micro_batch=case.micro_batch,
        scheduler=None if scheduler is None else accelerator.prepare(scheduler),
        clip_norm=case.clip_norm,
        batch_norm="exact" if case.are_rows_coupled else None,
    )
    loader = global_loader(accelerator, case.rows, case.batch, collate_fn=case.collate, shuffle=False)
    for _ in range(case.epochs):
        for batch in loader:
            update(batch)
    return Learnt(scheduler=scheduler)
