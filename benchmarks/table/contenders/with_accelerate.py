"""Accelerate as its own example `by_feature/gradient_accumulation.py` has it, the length of the schedule too."""

import accelerate
from torch import nn
from torch.optim import Optimizer

from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=case.micro_batches)
    # mixed_precision="fp16" makes no scaler on the CPU; this is where it would be
    accelerator.scaler = case.scaler()
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
