"""The Trainer of transformers, with a model that returns its loss."""

import tempfile
from typing import Any

import transformers
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.integrations.huggingface import exact
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt


class WithLoss(nn.Module):
    """A model of one's own as the Trainer's documentation asks for it: labels in, loss out."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, case.loss

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.model, (inputs, labels))}


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    return train(case, model, optimizer, transformers.Trainer)


def learn_exact(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    """Give the units of a model of one's own.

    Otherwise the first window is weighted when it is over, which a witness takes for a wrong weight.
    """

    def units(batch: Any) -> Any:
        return case.objective.units((batch["inputs"], batch["labels"]))

    batch_norm = "exact" if case.are_rows_coupled else None
    cls = exact(transformers.Trainer, units=units if is_own(case) else None, batch_norm=batch_norm)
    return train(case, model, optimizer, cls)


def train(case: Case, model: nn.Module, optimizer: Optimizer, trainer_class: type[Any]) -> Learnt:
    """With a Trainer of this class."""

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        batch = case.collate(rows)
        return {"inputs": batch[0], "labels": batch[1]} if is_own(case) else batch

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            WithLoss(case, model) if is_own(case) else model,
            arguments(case, folder, transformers.TrainingArguments, remove_unused_columns=False),
            train_dataset=case.rows,
            data_collator=collate,
            optimizers=(optimizer, None),
        )
        return run(case, trainer)


def is_own(case: Case) -> bool:
    """A model of one's own takes inputs and labels by their place."""
    return isinstance(case.rows[0], tuple)


def arguments(case: Case, folder: str, kind: type[Any], **options: Any) -> Any:
    """Of a Trainer or one derived from it."""
    return kind(
        folder,
        use_cpu=True,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.micro_batches,
        num_train_epochs=case.epochs,
        max_grad_norm=case.clip_norm or 0.0,
        lr_scheduler_type="linear" if case.is_scheduled else "constant",
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo" if case.ranks > 1 else None,
        **options,
    )


def run(case: Case, trainer: Any) -> Learnt:
    # fp16=True makes no scaler on the CPU; this is where it would be
    trainer.accelerator.scaler = case.scaler()
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return Learnt(scheduler=trainer.lr_scheduler)
