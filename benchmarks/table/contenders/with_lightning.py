"""Lightning: a module with a `training_step`, and `accumulate_grad_batches`."""

import copy
import os
from contextlib import nullcontext
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler

from anybatch import GlobalBatches
from anybatch.integrations.lightning import ExactDDPStrategy, ExactStrategy
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


class Scaled(MixedPrecision):
    """Lightning's loss scale without the autocast to fp16 that comes with it, which alone would be 2.9e-4 off."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__("16-mixed", "cpu", scaler)

    def forward_context(self) -> Any:
        return nullcontext()


class Module(lightning.LightningModule):
    """`interval` says when the scheduler steps; Lightning's default is once per epoch."""

    def __init__(self, case: Case, model: nn.Module, optimizer: Optimizer, interval: str) -> None:
        super().__init__()
        self.model, self.case, self.given, self.interval = model, case, optimizer, interval
        self.scheduler = case.scheduler(optimizer, case.num_updates)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.case.loss(self.model, batch)

    def configure_optimizers(self) -> Any:
        if self.scheduler is None:
            return self.given
        return {"optimizer": self.given, "lr_scheduler": {"scheduler": self.scheduler, "interval": self.interval}}


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    scheduler = fit(case, model, optimizer, "step")
    return Learnt(scheduler=scheduler, note=f"interval='step'; {default_lr(case):.0%} by default" if scheduler else "")


def learn_exact(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    module = Module(case, model, optimizer, "step")
    # left out, units would be seen, and the first batch weighted when it is over: to a witness a wrong weight
    units = case.objective.units if case.objective.units_for is None else case.objective.units_for(model)
    strategy = (ExactDDPStrategy if case.ranks > 1 else ExactStrategy)(
        micro_batch=case.micro_batch, units=units, batch_norm="exact" if case.are_rows_coupled else None
    )
    rank = int(os.environ.get("RANK", "0"))
    batches = GlobalBatches(case.rows, case.batch, shuffle=False, rank=rank, ranks=case.ranks)
    loader = batches.loader(collate_fn=case.collate) if case.ranks > 1 else case.loader(case.batch)
    return Learnt(scheduler=fit_with(case, module, strategy, 1, loader))


def fit(case: Case, model: nn.Module, optimizer: Optimizer, interval: str) -> LRScheduler | None:
    strategy = "ddp" if case.ranks > 1 else "auto"
    return fit_with(case, Module(case, model, optimizer, interval), strategy, case.micro_batches)


def fit_with(case: Case, module: Module, strategy: Any, accumulate: int, loader: Any = None) -> LRScheduler | None:
    """By a Trainer with this strategy; the loader is Lightning's usual one where none is given."""
    scaler = case.scaler()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        use_distributed_sampler=False,
        max_epochs=case.epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=case.clip_norm,
        plugins=[] if scaler is None else [Scaled(scaler)],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    if loader is None:
        # left to itself it deals the rows to ranks in an order of its own, and there would be no batch to compare with
        is_dealt = case.ranks > 1
        sampler = DistributedSampler(case.rows, case.ranks, trainer.global_rank, shuffle=False) if is_dealt else None
        loader = case.loader(case.micro_batch, sampler=sampler)
    trainer.fit(module, loader)
    return module.scheduler


def default_lr(case: Case) -> float:
    """Where the learning rate ends with Lightning's own interval, as a share of the first."""
    model = copy.deepcopy(case.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fit(case, model, optimizer, "epoch")
    return float(optimizer.param_groups[0]["lr"])
