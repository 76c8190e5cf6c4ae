"""A causal language model on ragged text: functions of Python's standard library, as bytes, cut by tokens.

Each update predicts the same bytes whatever the cut; sorted and trimmed micro-batches only hold less padding.
"""

import inspect
import random
import textwrap
import zipfile

import torch
from torch import Tensor, nn

from anybatch import Objective, Tokens, Update

random.seed(0)
torch.manual_seed(0)
functions = [
    inspect.getsource(value).encode()[:600]
    for module in (inspect, random, textwrap, zipfile)
    for _, value in inspect.getmembers(module, inspect.isfunction)
    if value.__module__ == module.__name__
]
random.shuffle(functions)


def padded(texts: list[bytes]) -> dict[str, Tensor]:
    length = max(map(len, texts))
    ids = torch.tensor([list(text) + [0] * (length - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


class Model(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.bytes, self.out = nn.Embedding(256, width), nn.Linear(width, 256)
        self.mix = nn.GRU(width, width, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mix(self.bytes(ids))[0])


def next_byte(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    guesses, targets = model(batch["input_ids"][:, :-1]), batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(guesses.transpose(1, 2), targets, ignore_index=0)


if __name__ == "__main__":
    model = Model()
    objective = Objective(next_byte, units=lambda batch: batch["attention_mask"][:, 1:].sum())
    update = Update(model, torch.optim.AdamW(model.parameters(), lr=1e-2), objective, micro_batch=Tokens(2048))
    for start in range(0, len(functions) - 31, 32):
        batch = padded(functions[start : start + 32])
        result = update(batch)
        cut = sum(part["input_ids"].numel() for part in Tokens(2048).cut(batch))
        saved = 1 - cut / batch["input_ids"].numel()
        print(
            f"loss {result.loss:.2f} over {result.units} bytes, {result.micro_batches} micro-batches, {saved:.0%} less padding"
        )
