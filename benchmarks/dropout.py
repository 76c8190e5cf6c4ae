"""`row_dropout` against torch's dropout: how far the cut moves the weights, and what the masks cost.

    python -m benchmarks.dropout [--quick]

A GPT of 2 layers x 64 learns from 50 batches of 64 rows, by SGD, in micro-batches of 64, 16 and 1. Then one batch of 8 rows
of 64 tokens goes forward and backward through a GPT of 4 layers x 256 without dropout, with torch's, and with row_dropout,
in turn.
"""

from collections.abc import Callable
from dataclasses import asdict
from time import process_time

import torch
from torch import Tensor, nn

from anybatch import Accumulator, Update, row_dropout, supervised
from benchmarks.meter import Timing, interleave
from benchmarks.results import is_quick, print_timings, write_results

Swap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer; dropout on attention weights and on both results."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mixing = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p))
        self.drop_weights, self.drop_seen = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.attend(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
        is_later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.drop_weights(scores.masked_fill(is_later, -torch.inf).softmax(-1))
        x = x + self.drop_seen(self.project((weights @ value).transpose(1, 2).reshape(rows, length, width)))
        return x + self.mix(self.before_mixing(x))


class GPT(nn.Module):
    """Predicts the next byte, classes in dim 1; with dropout in GPT-2's places."""

    def __init__(self, width: int, layers: int, p: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.drop = nn.Embedding(256, width), nn.Embedding(128, width), nn.Dropout(p)
        self.blocks = nn.Sequential(*(Block(width, 4, p) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.blocks(self.drop(self.embed(tokens) + self.place(places))))
        return logits.transpose(1, 2)


def law(swap: Swap, *, updates: int, sizes: tuple[int, ...] = (64, 16, 1)) -> dict[str, float]:
    """How far the weights end from those of the first size, as a share of how far those came: |w - w_0| / |w_0 - start|."""
    start, ends = _weights(GPT(64, 2)), []
    for size in sizes:
        model = swap(GPT(64, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=size)
        generator = torch.Generator().manual_seed(1)
        for _ in range(updates):
            tokens = torch.randint(0, 256, (64, 17), generator=generator)
            update((tokens[:, :-1], tokens[:, 1:]))
        ends.append(_weights(model))
    moved = (ends[0] - start).norm()
    return {str(size): float((end - ends[0]).norm() / moved) for size, end in zip(sizes[1:], ends[1:], strict=True)}


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def cost(rounds: int) -> dict[str, Timing]:
    """Forward and backward of one micro-batch, in processor time, as ratios to torch's dropout."""
    tokens = torch.randint(0, 256, (8, 65))

    def step(model: nn.Module) -> Callable[[], None]:
        accumulator = Accumulator(model, supervised(nn.CrossEntropyLoss()), micro_batch=8)

        def run() -> None:
            model.zero_grad()
            accumulator.backward((tokens[:, :-1], tokens[:, 1:]))

        return run

    models = {
        "torch's dropout": GPT(256, 4),
        "row_dropout": row_dropout(GPT(256, 4)),
        "no dropout": GPT(256, 4, p=0.0),
    }
    return interleave(
        {name: step(model) for name, model in models.items()}, rounds=rounds, repeats=1, clock=process_time
    )


def main() -> None:
    quick = is_quick(__doc__, "10 updates instead of 50, 10 rounds instead of 60")
    torch.set_num_threads(1)
    updates = 10 if quick else 50
    swaps: dict[str, Swap] = {"row_dropout": row_dropout, "torch's dropout": lambda model: model}
    off = {name: law(swap, updates=updates) for name, swap in swaps.items()}
    print(f"weights after {updates} updates: distance from those by 64 rows, as a share of how far they moved")
    for name, by_size in off.items():
        print(f"{name:18}" + "".join(f"  by {size}: {error:.1e}" for size, error in by_size.items()))
    timings = cost(10 if quick else 60)
    print_timings("time, as a ratio to torch's dropout", timings)
    times = {name: asdict(timing) for name, timing in timings.items()}
    write_results("dropout", {"updates": updates, "off": off, "time": times})


if __name__ == "__main__":
    main()
