"""Tiny models and rows for the trainers, what their optimizer was handed, and the whole batch at once in float64."""

import copy
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

logging.getLogger("accelerate").setLevel(logging.ERROR)
VOCABULARY = 50
Loss = Callable[[nn.Module, Any], Tensor]


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(num_labels: int = 3) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=num_labels, pad_token_id=0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Rows of 3 to 29 tokens, all of them targets."""
    torch.manual_seed(seed)
    found = [torch.randint(3, VOCABULARY, (int(length),)) for length in torch.randint(3, 30, (count,))]
    return [{"input_ids": text, "labels": text} for text in found]


def classified(count: int, seed: int = 2) -> list[dict[str, Tensor]]:
    """Rows of 6 tokens in one of 3 classes, the last of them rare."""
    torch.manual_seed(seed)
    classes = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), count, replacement=True)
    return [{"input_ids": torch.randint(3, VOCABULARY, (6,)), "labels": label} for label in classes]


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    if rows[0]["labels"].dim() == 0:
        labels = torch.stack([row["labels"] for row in rows])
    else:
        labels = pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def class_loss(model: nn.Module, batch: dict[str, Tensor], weight: Tensor | None = None) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]
    return F.cross_entropy(logits, batch["labels"], None if weight is None else weight.to(logits.dtype))


def log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].log_softmax(-1)
    chosen = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (chosen * batch["completion_mask"][:, 1:]).sum(1)


def preference_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """DPO's, of [chosen; rejected], against the model that training began with: `llama()`."""
    with torch.no_grad():
        before = log_probs(llama().to(next(model.parameters()).dtype), batch).chunk(2)
    now = log_probs(model, batch).chunk(2)
    return -F.logsigmoid(0.1 * ((now[0] - before[0]) - (now[1] - before[1]))).mean()


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
