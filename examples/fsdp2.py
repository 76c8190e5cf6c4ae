"""FSDP2 on two processes: torchrun --nproc-per-node 2 examples/fsdp2.py

A transformer sharded by `fully_shard` reads texts of many lengths. The usual loop averages over the tokens of each
micro-batch, and FSDP2 averages over ranks, as if every part had equally many tokens. anybatch divides by the tokens of all
ranks. Parameters, gradients and the optimizer's state stay sharded.
"""

import random
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from anybatch import Objective, Update

paragraphs = [part.encode()[:200] for text in topics.values() for part in text.split("\n\n") if part.strip()]
random.Random(0).shuffle(paragraphs)
batches = [
    nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in paragraphs[start : start + 32]], batch_first=True)
    for start in range(0, 320, 32)
]  # padded with 0


class Reader(nn.Module):
    """Guess the next byte from the ones before."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        hidden, mask = self.tokens(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))  # logits of all positions


def make_model(is_sharded: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = Reader()
    if is_sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def next_byte_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]), ids[:, 1:].flatten(), ignore_index=0)


def train_usual(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in batches:
        optimizer.zero_grad()
        parts = batch.chunk(dist.get_world_size())[dist.get_rank()].split(4)
        for number, part in enumerate(parts, 1):
            model.set_requires_gradient_sync(number == len(parts))  # reduce in the last backward only
            (next_byte_loss(model, part) / len(parts)).backward()
        optimizer.step()


def train_anybatch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    objective = Objective(next_byte_loss, units=lambda ids: (ids[:, 1:] != 0).sum())
    update = Update(model, optimizer, objective, micro_batch=4)
    for batch in batches:
        update(batch.chunk(dist.get_world_size())[dist.get_rank()])  # the rows of this rank


def first_gradient(train: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Tensor:
    model, gradients = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flat_gradient(model)))
    train(model, optimizer)
    return gradients[0]


def flat_gradient(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([(grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten() for grad in gradients])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    reference = make_model(is_sharded=False)
    next_byte_loss(reference, batches[0]).backward()  # the whole batch in one pass, in one process
    expected = flat_gradient(reference)
    for name, train in {"usual loop": train_usual, "anybatch": train_anybatch}.items():
        error = (first_gradient(train) - expected).norm() / expected.norm()
        if dist.get_rank() == 0:
            print(f"{name:10}  gradient off by {error:.0e}")
    dist.destroy_process_group()
