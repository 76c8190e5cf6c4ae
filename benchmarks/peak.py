"""Peak live tensor memory of one update, from 1 to 64 micro-batches of one size; the batch itself is not counted.

    python -m benchmarks.peak

With one micro-batch no gradient lives through a forward pass; from two on, the gradients do, in any accumulation. So the
step from 1 to 2 is the size of the gradients, and from 2 to 64 nothing is added.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from anybatch import Update, supervised
from benchmarks.meter import peak_bytes
from benchmarks.models import SmallTransformer
from benchmarks.results import write_results

COUNTS = (1, 2, 4, 16, 64)


def peaks(
    model: nn.Module,
    make_batch: Callable[[int], tuple[Tensor, Tensor]],
    micro_batch: int,
    counts: tuple[int, ...] = COUNTS,
) -> dict[int, int]:
    """Peak live bytes of one update by its number of micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    update = Update(model, optimizer, supervised(nn.CrossEntropyLoss()), micro_batch=micro_batch)
    measured = {}
    for count in counts:
        batch = make_batch(count * micro_batch)
        update(batch)
        held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
        measured[count] = peak_bytes(lambda batch=batch: update(batch), held)
    return measured


def convolutional(counts: tuple[int, ...] = COUNTS) -> dict[int, int]:
    """Few parameters and large activations, as images have."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.ReLU()) for into, out in pairwise([3, 16, 16, 16])]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    return peaks(model, lambda rows: (torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))), 32, counts)


def transformer(counts: tuple[int, ...] = COUNTS) -> dict[int, int]:
    """Parameters that weigh about as much as the activations of a small micro-batch."""
    torch.manual_seed(0)

    def tokens(rows: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, 256, (rows, 64))
        return drawn, drawn.roll(-1, 1)

    return peaks(SmallTransformer(), tokens, 8, counts)


def main() -> None:
    works = {
        "convolutional net, 32 rows of 3x32x32": convolutional(),
        "transformer 4 x 128, 8 rows of 64 tokens": transformer(),
    }
    for name, measured in works.items():
        print(f"\n{name}: peak live tensor memory")
        for count, peak in measured.items():
            of_one, of_two = peak / measured[1], peak / measured[2]
            print(f"  {count:3} micro-batches  {peak / 2**20:8.2f} MiB   {of_one:.4f} of one   {of_two:.4f} of two")
    write_results("peak", {"bytes": works})


if __name__ == "__main__":
    main()
