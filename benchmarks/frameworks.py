"""The trainers of transformers, TRL and sentence-transformers, stock and exact, against the whole batch in float64.

    python -m benchmarks.frameworks [--only NAME]...

Windows of 4 x 3 rows and a tail of 7: of each, the largest relative error of what the optimizer is handed; beside it that of
the whole batch at once in fp32.
"""

import argparse
import copy
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

from anybatch.integrations.huggingface import exact
from benchmarks.heads import HEADS, Head, collate

ROWS, WINDOW = 19, 12
Loss = Callable[[nn.Module, Any], Tensor]
FILE = Path(__file__).parent.parent / "docs/benchmarks/frameworks.json"


class Handed(transformers.TrainerCallback):  # type: ignore[misc]
    """What the optimizer was handed."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(gradient_of(model))


def gradient_of(model: nn.Module) -> Tensor:
    """All gradients in one vector, in float64."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
    return torch.cat([grad.detach().double().flatten() for grad in grads])


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model computes of itself."""
    loss: Tensor = model(**batch).loss
    return loss


def whole(
    model: nn.Module, rows: list[Any], join: Callable[[list[Any]], Any], loss: Loss, dtype: torch.dtype
) -> list[Tensor]:
    """The gradient of each window at once; weights stay as they are."""
    found = []
    for start in range(0, len(rows), WINDOW):
        twin = copy.deepcopy(model).to(dtype).train()
        batch = join(rows[start : start + WINDOW])
        is_float = {key: isinstance(value, Tensor) and value.is_floating_point() for key, value in batch.items()}
        loss(twin, {key: value.to(dtype) if is_float[key] else value for key, value in batch.items()}).backward()
        found.append(gradient_of(twin))
    return found


def error_of(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative error over the updates."""
    assert len(found) == len(wanted), (len(found), len(wanted))
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))


def handed_by(cls: type[Any], model: nn.Module, rows: list[Any]) -> list[Tensor]:
    """What a Trainer of this class hands its optimizer, at weights that never move."""
    handed = Handed()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=3, gradient_accumulation_steps=4, num_train_epochs=1,
            max_grad_norm=0.0, train_sampling_strategy="sequential", report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, learning_rate=0.0, dataloader_pin_memory=False,
            remove_unused_columns=False, optim="sgd",
        )  # fmt: skip
        trainer = cls(copy.deepcopy(model), args, train_dataset=rows, data_collator=collate, callbacks=[handed])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return handed.gradients


def measured(model: nn.Module, rows: list[Any], *, has_batch_norm: bool = False) -> dict[str, float]:
    wanted = whole(model, rows, collate, own_loss, torch.float64)
    cls = exact(transformers.Trainer, batch_norm="exact" if has_batch_norm else None)
    return {
        "stock": error_of(handed_by(transformers.Trainer, model, rows), wanted),
        "exact": error_of(handed_by(cls, model, rows), wanted),
        "whole batch in fp32": error_of(whole(model, rows, collate, own_loss, torch.float32), wanted),
    }


def lora(head: Head) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(head.make(), config)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--quick", action="store_true", help="nothing is shorter here")
    only = parser.parse_args().only
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    table: dict[str, dict[str, float]] = {}
    for head in HEADS:
        if not only or head.model in only:
            table[head.model] = measured(head.make(), head.rows(ROWS), has_batch_norm=head.has_batch_norm)
            print(head.model, {name: f"{value:.1e}" for name, value in table[head.model].items()}, flush=True)
    if not only or "LoRA" in only:
        table["LlamaForCausalLM with LoRA"] = measured(lora(HEADS[0]), HEADS[0].rows(ROWS))
        print("LoRA", table["LlamaForCausalLM with LoRA"], flush=True)
    if not only:
        FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
