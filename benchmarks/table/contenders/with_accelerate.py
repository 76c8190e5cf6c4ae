"""Accelerate as its own example `by_feature/gradient_accumulation.py` has it, the length of the schedule too."""

import accelerate
from torch import nn
from torch.optim import Optimizer

from anybatch.integrations.accelerate import global_loader, prepared_update
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    accelerator = make_accelerator(case, gradient_accumulation_steps=case.micro_batches)
    loader = case.loader(case.micro_batch)
    # the example gives the schedule one step per micro-batch; where an inf is what is looked for, it has its right length
    scheduler = case.scheduler(optimizer, case.num_updates if case.is_scaled else len(loader) * case.epochs)
    wrapped, prepared, loader = accelerator.prepare(model, optimizer, loader)
    schedule = None if scheduler is None else accelerator.prepare(scheduler)
    for _ in range(case.epochs):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(case.loss(wrapped, batch))
                if case.clip_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), case.clip_norm)
                prepared.step()
                if schedule is not None:
                    schedule.step()
                prepared.zero_grad()
    is_example = case.is_scheduled and not case.is_scaled
    return Learnt(scheduler=scheduler, note="schedule as long as in the official example" if is_example else "")


def learn_exact(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    accelerator = make_accelerator(case)
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


def make_accelerator(case: Case, **options: int) -> accelerate.Accelerator:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, **options)
    # mixed_precision="fp16" makes no scaler on the CPU; this is where it would be
    accelerator.scaler = case.scaler()
    return accelerator
