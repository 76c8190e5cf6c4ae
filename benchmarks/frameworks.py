"""The trainers of transformers, TRL and sentence-transformers, stock and exact, against the whole batch in float64.

    python -m benchmarks.frameworks [heads|trl|cost]...
    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.frameworks trl

Windows of 12 rows and a tail of 7, over all ranks: of each, the largest relative error of what the optimizer is handed; for
heads, beside it that of the whole batch at once in fp32. `cost` is processor time for the same batches.
"""

import copy
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

from anybatch import Tokens
from anybatch.integrations.huggingface import exact
from benchmarks.heads import HEADS, collate
from benchmarks.trainers import errors, trained, vector_of, windows_of

ROWS = 19
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
FILE = Path(__file__).parent.parent / "docs/benchmarks/frameworks.json"


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model computes of itself, in the model's precision."""
    dtype = next(model.parameters()).dtype
    is_float = {key: value.is_floating_point() for key, value in batch.items()}
    loss: Tensor = model(**{key: value.to(dtype) if is_float[key] else value for key, value in batch.items()}).loss
    return loss


def at_once(model: nn.Module, rows: list[Any]) -> float:
    """The error of the whole batch in one go, in fp32."""
    found = []
    for batch in windows_of(rows, collate=collate):
        one, other = copy.deepcopy(model), copy.deepcopy(model).double()
        gradients = []
        for twin in (one, other):
            own_loss(twin.train(), batch).backward()
            gradients.append(torch.cat([vector_of(p) for p in twin.parameters() if p.requires_grad]))
        found.append(float((gradients[0] - gradients[1]).norm() / gradients[1].norm()))
    return max(found)


def error_of(cls: type[Any], model: nn.Module, rows: list[Any]) -> float:
    """Of a Trainer of this class."""
    _, handed = trained(cls, copy.deepcopy(model), rows, given={"data_collator": collate})
    return max(errors(handed, model.train(), windows_of(rows, collate=collate), own_loss))


def heads() -> dict[str, dict[str, float]]:
    """18 heads, and one with adapters."""
    table = {}
    models = [(head.model, head.make(), head.rows(ROWS), head.has_batch_norm) for head in HEADS]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    models.append(("LlamaForCausalLM, LoRA", peft.get_peft_model(HEADS[0].make(), config), HEADS[0].rows(ROWS), False))
    for name, model, rows, has_batch_norm in models:
        cls = exact(transformers.Trainer, batch_norm="exact" if has_batch_norm else None)
        table[name] = {
            "stock": error_of(transformers.Trainer, model, rows),
            "exact": error_of(cls, model, rows),
            "at once": at_once(model, rows),
        }
        tell(name, table[name])
    return table


def trl() -> dict[str, dict[str, float]]:
    """Fine-tuning, preferences, rewards, sentences; on as many ranks as there are, in windows of 12 rows."""
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer import losses

    from benchmarks import sentence_cases
    from benchmarks.trl_cases import DPO, REWARD, SFT, batches_of, fitted

    table: dict[str, dict[str, float]] = {}
    options = {"gradient_accumulation_steps": 4 // RANKS} | ({"ddp_backend": "gloo"} if RANKS > 1 else {})
    for kind in (SFT, DPO, REWARD):
        stock, config, rows, model, loss = kind
        table[stock.__name__] = {}
        for name, cls in (("stock", stock), ("exact", exact(stock))):
            with tempfile.TemporaryDirectory() as folder:
                trainer, handed = fitted(cls, config, rows, model(), folder, **options)
            table[stock.__name__][name] = max(errors(handed, model(), batches_of(trainer), loss))
        tell(stock.__name__, table[stock.__name__])
    table["MultipleNegativesRankingLoss"] = {}
    for name, cls in (("stock", SentenceTransformerTrainer), ("exact", exact(SentenceTransformerTrainer))):
        with tempfile.TemporaryDirectory() as folder:
            _, handed = sentence_cases.fitted(cls, losses.MultipleNegativesRankingLoss, folder, **options)
        table["MultipleNegativesRankingLoss"][name] = sentence_cases.error_of(handed)
    tell("MultipleNegativesRankingLoss", table["MultipleNegativesRankingLoss"])
    return table


def cost() -> dict[str, dict[str, float]]:
    """Processor time of a ragged language model, as a ratio to the Trainer's; the least of three runs of each."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip
    lengths = torch.empty(128).log_normal_(3.0, 1.0).clamp(4, 200).long()
    texts = [torch.randint(3, 500, (int(length),)) for length in lengths]
    rows = [{"input_ids": text, "labels": text} for text in texts]
    kinds = {
        "Trainer": transformers.Trainer,
        "exact": exact(transformers.Trainer),
        "exact, Tokens(1024)": exact(transformers.Trainer, micro_batch=Tokens(1024)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(3):
        for name, cls in kinds.items():
            model = transformers.LlamaForCausalLM(config)
            start = time.process_time()
            trained(cls, model, rows, per_device_train_batch_size=8, gradient_accumulation_steps=4)
            seconds[name].append(time.process_time() - start)
    least = {name: min(each) for name, each in seconds.items()}
    table = {name: {"seconds": value, "of the Trainer's": value / least["Trainer"]} for name, value in least.items()}
    for name, entry in table.items():
        tell(name, entry)
    return table


def tell(name: str, entry: dict[str, float]) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(name, {key: f"{value:.2g}" for key, value in entry.items()}, flush=True)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    parts = {"heads": heads, "trl": trl, "cost": cost}
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in [one for one in sys.argv[1:] if one in parts] or parts:
        known[f"{name}, {RANKS} ranks" if RANKS > 1 else name] = parts[name]()
    if os.environ.get("RANK", "0") == "0":
        FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
