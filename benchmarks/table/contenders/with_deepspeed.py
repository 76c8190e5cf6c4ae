"""DeepSpeed's engine: `engine.backward`, `engine.step`, the windows counted by the engine itself."""

import deepspeed
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    deepspeed.init_distributed(dist_backend="gloo")
    scheduler = case.scheduler(optimizer, case.num_updates)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={
            "train_micro_batch_size_per_gpu": case.micro_batch,
            "gradient_accumulation_steps": case.micro_batches,
            "gradient_clipping": case.clip_norm or 0.0,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
        },
    )
    sampler = DistributedSampler(case.rows, shuffle=False) if case.ranks > 1 else None
    for _ in range(case.epochs):
        for batch in case.loader(case.micro_batch, sampler=sampler):
            engine.backward(case.loss(engine, batch))
            engine.step()
    return Learnt(scheduler=scheduler)
