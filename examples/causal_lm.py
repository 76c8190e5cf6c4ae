"""Causal language model on text of many lengths: paragraphs of Python's own help, read byte by byte.

The usual loop averages each micro-batch over its own bytes and then averages the micro-batches, so a byte in a short text
counts more than one in a long text. anybatch divides by the bytes of the whole batch. `Tokens(2048)` also puts texts of similar
length together and cuts off their common padding, so that the model computes fewer padding positions.
"""

from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from anybatch import Objective, Tokens, Update

Batch = dict[str, Tensor]
paragraphs = [part.encode()[:400] for text in topics.values() for part in text.split("\n\n") if part.strip()]


def collate(texts: list[bytes]) -> Batch:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in texts], batch_first=True)  # pads with 0
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(400, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.block(hidden, mask, is_causal=True))


def make_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits, targets = model(batch["input_ids"][:, :-1]), batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def train_usual(model: nn.Module, batches: list[Batch], micro_batch: int = 4) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        parts = list(zip(*(column.split(micro_batch) for column in batch.values()), strict=True))
        for part in parts:
            (next_byte_loss(model, dict(zip(batch, part, strict=True))) / len(parts)).backward()
        optimizer.step()


def train_anybatch(model: nn.Module, batches: list[Batch]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objective = Objective(next_byte_loss, units=lambda batch: batch["attention_mask"][:, 1:].sum())
    update = Update(model, optimizer, objective, micro_batch=Tokens(2048))
    for batch in batches:
        update(batch)


def gradient(train: Callable[[nn.Module, list[Batch]], None], batch: Batch) -> Tensor:
    model = make_model()
    train(model, [batch])
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


if __name__ == "__main__":
    batches = [collate(paragraphs[start : start + 32]) for start in range(0, 320, 32)]
    whole_batch = partial(train_usual, micro_batch=32)
    reference = gradient(whole_batch, batches[0])
    for name, train in {"whole batch": whole_batch, "usual loop": train_usual, "anybatch": train_anybatch}.items():
        error = (gradient(train, batches[0]) - reference).norm() / reference.norm()
        model = make_model()
        train(model, batches)
        print(
            f"{name:11}  gradient off by {error:.0e}  loss of the last batch {next_byte_loss(model, batches[-1]):.3f}"
        )
    padded = sum(batch["input_ids"].numel() for batch in batches)
    trimmed = sum(part["input_ids"].numel() for batch in batches for part in Tokens(2048).cut(batch))
    print(f"Tokens(2048) computes {1 - trimmed / padded:.0%} fewer positions than batches padded to their longest text")
