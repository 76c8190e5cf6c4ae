"""Sound models of many kinds, each with an objective and a batch that suits it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from anybatch import Coupled, Objective, Tokens, clip_loss, huggingface, info_nce, supervised

ROWS, LENGTH, VOCABULARY, CLASSES = 11, 9, 23, 3
Sound = tuple[nn.Module, Any, Any, dict[str, Any]]
"""Model, objective, batch, options of `verify`."""


def rows_of_numbers(width: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, width), torch.randint(0, CLASSES, (ROWS,))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 1, 8, 8), torch.randint(0, CLASSES, (ROWS,))


def texts(*, has_labels: bool = True) -> dict[str, Tensor]:
    """Ragged rows, padded on the right; labels of padding are ignored."""
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1))
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH)) * mask
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | {"labels": torch.where(mask == 1, ids, -100)} if has_labels else batch


class GPT(nn.Module):
    """A small causal transformer with dropout inside attention and out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 16)
        self.place = nn.Embedding(LENGTH, 16)
        self.query = nn.Linear(16, 48)
        self.after = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))

    def forward(self, ids: Tensor) -> Tensor:
        states = F.dropout(self.token(ids) + self.place(torch.arange(ids.shape[1])), 0.1)
        query, key, value = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.query(states).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        states = states + mixed.transpose(1, 2).flatten(2)
        return (states + self.after(states)) @ self.token.weight.T


class LSTM(nn.Module):
    """Time first, with dropout between its layers: rows are dim 1 of what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, dropout=0.3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.lstm(series.transpose(0, 1))
        return self.head(states[-1])


class BagOfWords(nn.Module):
    """An embedding with padding and sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8, padding_idx=0, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).sum(1) / (ids != 0).sum(1, keepdim=True))


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def shifted(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, CLASSES))


def cnn(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3), norm(6), nn.ReLU(), nn.Dropout2d(0.2)),
        *(nn.Conv2d(6, 6, 3), norm(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, CLASSES)),
    )


def towers() -> nn.ModuleDict:
    return nn.ModuleDict({"left": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2)), "right": nn.Linear(6, 8)})


def both(model: Any, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model["left"](pair[0]), model["right"](pair[1])


TINY = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {
    **TINY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
}


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TINY, n_embd=16, n_layer=1, n_head=2, n_positions=16)).train()


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**BERT, num_key_value_heads=2)).train()


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**BERT)).train()


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**TINY, **sizes, decoder_start_token_id=0)).train()


def sorts() -> dict[str, Callable[[], Sound]]:
    """Every kind by name, to be made anew."""
    cross_entropy = supervised(nn.CrossEntropyLoss())
    weighted = supervised(nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 20.0])))
    series = lambda: (torch.randn(ROWS, 7, 4), torch.randint(0, CLASSES, (ROWS,)))  # noqa: E731
    pairs = lambda: (torch.randn(ROWS, 6), torch.randn(ROWS, 6))  # noqa: E731
    return {
        "perceptron": lambda: (mlp(), cross_entropy, rows_of_numbers(), {"micro_batch": 4}),
        "perceptron with dropout": lambda: (mlp(0.4), cross_entropy, rows_of_numbers(), {}),
        "convolutions": lambda: (cnn(lambda n: nn.GroupNorm(2, n)), cross_entropy, images(), {}),
        "convolutions with BatchNorm": lambda: (
            cnn(nn.BatchNorm2d),
            cross_entropy,
            images(),
            {"batch_norm": "exact", "micro_batch": 4},
        ),
        "LSTM": lambda: (LSTM(), cross_entropy, series(), {}),
        "GPT by tokens": lambda: (GPT(), Objective(next_token, shifted), texts(), {"micro_batch": Tokens(2 * LENGTH)}),
        "class weights": lambda: (mlp(), weighted, rows_of_numbers(), {}),
        "sum": lambda: (
            mlp(),
            supervised(nn.MSELoss(reduction="sum")),
            (torch.randn(ROWS, 6), torch.randn(ROWS, 3)),
            {},
        ),
        "InfoNCE": lambda: (towers(), Coupled(both, info_nce()), pairs(), {"micro_batch": 3}),
        "InfoNCE with a learned temperature": lambda: (towers(), Coupled(both, clip_loss()), pairs(), {}),
        "bag of words": lambda: (BagOfWords(), cross_entropy, (texts()["input_ids"], rows_of_numbers()[1]), {}),
        "autocast": lambda: (mlp(0.2), cross_entropy, rows_of_numbers(), {"autocast": torch.bfloat16}),
        "bf16": lambda: (mlp().bfloat16(), cross_entropy, _bf16(rows_of_numbers()), {}),
        "GPT-2": lambda: (gpt2(), huggingface(), texts(), {"micro_batch": 4}),
        "Llama": lambda: (llama(), huggingface(), texts(), {}),
        "BERT": lambda: (
            bert(),
            huggingface(),
            texts(has_labels=False) | {"labels": torch.randint(0, CLASSES, (ROWS,))},
            {"micro_batch": Tokens(3 * LENGTH)},
        ),
        "T5": lambda: (t5(), huggingface(), texts(), {}),
    }


def _bf16(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].bfloat16(), batch[1]
