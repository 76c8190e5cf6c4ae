"""Runs of the trainers, what their optimizer was handed, and the whole batch at once in float64."""

import copy
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.tiny_models import pad

logging.getLogger("accelerate").setLevel(logging.ERROR)
Loss = Callable[[nn.Module, Any], Tensor]


class Handed(transformers.TrainerCallback):
    """What the optimizer was handed at each step, and at which weights."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.models: list[nn.Module] = []
        self.told: list[str] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.gradients.append(torch.cat([vector_of(parameter) for parameter in trained]))
        self.models.append({name: whole(value).detach().clone() for name, value in model.state_dict().items()})


def vector_of(parameter: Tensor) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return whole(gradient).detach().double().flatten()


def whole(tensor: Any) -> Tensor:
    """All of a tensor that may be sharded."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def arguments(folder: str, kind: type = transformers.TrainingArguments, **options: Any) -> Any:
    """3 rows a time, 4 times: windows of 12."""
    usual = {
        "use_cpu": True, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "num_train_epochs": 1,
        "max_grad_norm": 0.0, "train_sampling_strategy": "sequential", "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-2, "dataloader_pin_memory": False,
        "remove_unused_columns": False, "optim": "sgd", "lr_scheduler_type": "constant",
    }  # fmt: skip
    return kind(folder, **usual | options)


def trained(cls: type, model: nn.Module, rows: Any, *, given: Any = None, resume: Any = None, **options: Any) -> Any:
    """(trainer, what its optimizer was handed) after training on `rows`. `given` are more arguments of the trainer."""
    handed = Handed()
    extra = dict(given or {})
    with tempfile.TemporaryDirectory() as folder:
        trainer = cls(
            model,
            arguments(options.pop("folder", folder), **options),
            train_dataset=rows,
            data_collator=extra.pop("data_collator", pad),
            callbacks=[handed, *extra.pop("callbacks", [])],
            **extra,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=resume)
    return trainer, handed


def errors(handed: Handed, model: nn.Module, batches: list[Any], loss: Loss) -> list[float]:
    """How far each gradient is from that of its whole batch, in float64, at the weights that the update saw."""
    assert len(handed.gradients) == len(batches)
    found = []
    for gradient, weights, batch in zip(handed.gradients, handed.models, batches, strict=True):
        twin = copy.deepcopy(model)
        twin.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
        twin = twin.double()
        twin.zero_grad()
        loss(twin, batch).backward()
        wanted = torch.cat([vector_of(one) for one in twin.parameters() if one.requires_grad])
        found.append(float((gradient - wanted).norm() / wanted.norm()))
    return found


def windows_of(rows: list[Any], size: int = 12, collate: Callable[[list[Any]], Any] = pad) -> list[Any]:
    return [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
