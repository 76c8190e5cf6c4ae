"""I use TRL: exact(SFTTrainer). The help texts of Python itself, read word by word by a small Llama.

python examples/trl_sft.py [updates]
"""

import sys
import tempfile
from pydoc_data.topics import topics

import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from anybatch import Tokens
from anybatch.integrations.huggingface import exact


def main(updates: int = 20) -> float:
    """The last loss that was logged: per token of the whole batch."""
    texts = [part for text in topics.values() for part in text.split("\n\n") if part.strip()]
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=500, special_tokens=["<unk>", "<pad>", "</s>"])
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, pad_token_id=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            folder, use_cpu=True, bf16=False, max_length=64, max_steps=updates, per_device_train_batch_size=8,
            gradient_accumulation_steps=4, learning_rate=1e-2, logging_steps=updates, report_to="none", disable_tqdm=True,
            save_strategy="no", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = exact(
            trl.SFTTrainer, micro_batch=Tokens(512)
        )(  # was: trl.SFTTrainer(
            transformers.LlamaForCausalLM(config),
            args=args,
            train_dataset=Dataset.from_dict({"text": texts[:200]}),
            processing_class=tokenizer,
        )
        trainer.train()
    return float(trainer.state.log_history[0]["loss"])


if __name__ == "__main__":
    print(f"loss per token of the last updates: {main(*map(int, sys.argv[1:])):.3f}")
