"""Supervised fine-tuning with TRL and LoRA: a trainer with a loss of its own, as it is and with `exact`.

SFTTrainer's built-in loss divides by the target tokens of all micro-batches of an update, which is right on one process. A
`compute_loss` of your own returns the mean of one micro-batch, and the trainer adds these means up as if they were shares of a
sum: the gradient is about 4 times too large with 4 micro-batches. `exact` sees what the loss divides by and weights each
micro-batch. It works for the built-in losses as well, on any number of ranks; `Tokens(512)` also saves padding.

    python examples/trl_sft_lora.py [updates]
"""

import logging
import sys
import tempfile
from pydoc_data.topics import topics
from typing import Any

import datasets
import torch
import transformers
import trl
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from anybatch import Tokens
from anybatch.integrations.huggingface import exact

texts = [part for text in topics.values() for part in text.split("\n\n") if part.strip()][:200]


class SmoothedSFTTrainer(trl.SFTTrainer):
    """SFTTrainer with label smoothing."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


class FirstGradient(transformers.TrainerCallback):
    """Keeps the gradient that the optimizer steps with first."""

    value: torch.Tensor | None = None

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        if self.value is None:
            self.value = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "</s>"]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=500, special_tokens=special))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def train(kind: type[trl.SFTTrainer], updates: int, micro_batch: int) -> tuple[torch.Tensor, float]:
    """Fine-tune with batches of 16 texts; return the first gradient, and the mean loss as it was logged."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, pad_token_id=1,
    )  # fmt: skip
    gradient = FirstGradient()
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            folder, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=16 // micro_batch,
            max_steps=updates, learning_rate=1e-2, max_length=128, max_grad_norm=0.0, use_cpu=True, bf16=False,
            gradient_checkpointing=False, logging_steps=updates, report_to="none", disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = kind(
            transformers.LlamaForCausalLM(config),
            args=args,
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
            callbacks=[gradient],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return gradient.value, float(trainer.state.log_history[0]["loss"])


def main(updates: int = 8) -> dict[str, float]:
    """Return the error of the first gradient, by the name of the run."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    exact_trainer = exact(SmoothedSFTTrainer, micro_batch=Tokens(512))
    reference, _ = train(SmoothedSFTTrainer, updates, micro_batch=16)
    errors = {}
    for name, kind in {"SmoothedSFTTrainer": SmoothedSFTTrainer, "exact(SmoothedSFTTrainer)": exact_trainer}.items():
        gradient, loss = train(kind, updates, micro_batch=4)
        errors[name] = float((gradient - reference).norm() / reference.norm())
        print(f"{name:25}  gradient off by {errors[name]:.0e}  logged loss per token {loss:.2f}")
    return errors


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
