"""One batch of raw samples, one update: anybatch, a careful loop by hand, and the frameworks, all on the same model.

Times are those of the processor: with one thread that is the work done, whoever else uses the machine.
"""

import copy
import logging
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import process_time
from typing import Any

import accelerate
import lightning
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import BatchRebalanceSampler, get_length_grouped_indices

from anybatch import Tokens, Update, huggingface
from benchmarks.texts import Sample, collate

ROWS = 8
"""Rows per micro-batch of those who do not choose; the cap on padded tokens is this many of the batch's longest row."""


class Recorder(torch.optim.SGD):
    """A step of size 0 that keeps the gradient it was given: the model stays where it is, and all see the same weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.gradient = torch.zeros(())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        self.gradient = torch.cat([grad.flatten() for grad in grads if grad is not None]).clone()
        return loss


class Contender(ABC):
    """Runs one update and says how many seconds it took; the gradient is in `optimizer.gradient`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = Recorder(self.model)

    @abstractmethod
    def run(self, samples: list[Sample]) -> float:
        """One update from these samples, and the seconds it took."""

    def micro_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        """Which samples run together: arrival order, `ROWS` at a time."""
        return [samples[start : start + ROWS] for start in range(0, len(samples), ROWS)]


class Anybatch(Contender):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.split = Tokens(1, collate=collate, learn=True)
        self.update = Update(self.model, self.optimizer, huggingface(), micro_batch=self.split)

    def run(self, samples: list[Sample]) -> float:
        self.split.budget = cap(samples)
        start = process_time()
        self.update(samples)
        return process_time() - start

    def micro_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        self.split.budget = cap(samples)
        return [[samples[row] for row in rows] for rows in self.split.cut(samples).row_numbers]


class HandLoop(Contender):
    """Weights every micro-batch by its target tokens, as it should be done and seldom is."""

    def run(self, samples: list[Sample]) -> float:
        start = process_time()
        self.optimizer.zero_grad()
        total = sum(len(sample["labels"]) - 1 for sample in samples)
        for part in DataLoader(samples, batch_size=ROWS, collate_fn=collate):
            units = int((part["labels"][:, 1:] != -100).sum())
            (self.model(**part).loss * (units / total)).backward()
        self.optimizer.step()
        return process_time() - start


class Accelerate(Contender):
    """Its documented loop: `accumulate` and the mean loss of each micro-batch."""

    def run(self, samples: list[Sample]) -> float:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=-(-len(samples) // ROWS))
        loader = DataLoader(samples, batch_size=ROWS, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(self.model, self.optimizer, loader)
        start = process_time()
        for part in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**part).loss)
                optimizer.step()
                optimizer.zero_grad()
        return process_time() - start


class StepClock(transformers.TrainerCallback):
    """Seconds from the first micro-batch of an update to the end of its step."""

    def __init__(self) -> None:
        self.start = self.seconds = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = process_time() - self.start


class Trainer(Contender):
    """Hugging Face's; `strategy` is its `train_sampling_strategy`."""

    strategy = "sequential"

    def run(self, samples: list[Sample]) -> float:
        clock = StepClock()
        with tempfile.TemporaryDirectory() as folder:
            options = transformers.TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=ROWS,
                gradient_accumulation_steps=-(-len(samples) // ROWS),
                max_steps=1,
                max_grad_norm=0.0,
                train_sampling_strategy=self.strategy,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                remove_unused_columns=False,
            )
            trainer = transformers.Trainer(
                self.model,
                options,
                train_dataset=samples,
                data_collator=collate,
                optimizers=(self.optimizer, torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)),
                callbacks=[clock],
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
        return clock.seconds


class TrainerGrouped(Trainer):
    """Sorted by length over up to 50 batches of the data set; here the data set is the one batch."""

    strategy = "group_by_length"

    def micro_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        lengths = [len(sample["input_ids"]) for sample in samples]
        chance = torch.Generator().manual_seed(0)
        ordered = [samples[row] for row in get_length_grouped_indices(lengths, len(samples), generator=chance)]
        return super().micro_batches(ordered)


class TrainerRebalanced(Trainer):
    """Cuts each batch, sorted by length, into as many micro-batches as asked for, of nearly equal cost."""

    strategy = "batch_rebalance"

    def micro_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        lengths = [len(sample["input_ids"]) for sample in samples]
        groups = BatchRebalanceSampler(lengths, len(samples), dp_size=1, grad_accum=-(-len(samples) // ROWS))
        return [[samples[row] for row in group] for group in groups]


class Wrapped(lightning.LightningModule):
    def __init__(self, model: nn.Module, optimizer: Recorder) -> None:
        super().__init__()
        self.model, self.recorder = model, optimizer

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recorder


class BatchClock(lightning.Callback):
    """Seconds from the first micro-batch to the end of the last."""

    def __init__(self) -> None:
        self.start = self.end = 0.0

    def on_train_batch_start(self, *args: object) -> None:
        self.start = self.start or process_time()

    def on_train_batch_end(self, *args: object) -> None:
        self.end = process_time()


class Lightning(Contender):
    def run(self, samples: list[Sample]) -> float:
        clock = BatchClock()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            accumulate_grad_batches=-(-len(samples) // ROWS),
            callbacks=[clock],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(Wrapped(self.model, self.optimizer), DataLoader(samples, batch_size=ROWS, collate_fn=collate))
        return clock.end - clock.start


CONTENDERS: dict[str, type[Contender]] = {
    "anybatch Tokens": Anybatch,
    "loop by hand": HandLoop,
    "Accelerate": Accelerate,
    "Lightning": Lightning,
    "HF Trainer": Trainer,
    "HF Trainer, group_by_length": TrainerGrouped,
    "HF Trainer, batch_rebalance": TrainerRebalanced,
}


def cap(samples: list[Sample]) -> int:
    """The padded tokens that the largest micro-batch of `ROWS` rows may hold."""
    return ROWS * max(len(sample["input_ids"]) for sample in samples)


def without_warnings() -> None:
    """Frameworks say much that is of no use here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    transformers.utils.logging.set_verbosity_error()
