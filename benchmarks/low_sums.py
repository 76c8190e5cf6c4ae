"""Three ways to add up the gradients of bf16 parameters: in fp32, in bf16, and in bf16 with stochastic rounding.

    python -m benchmarks.low_sums

The relative error of the sum to the gradient of the whole batch in float64, at the same weights, over ten seeds; what is due to
bf16 forwards and backwards alone is in all three. Stochastic rounding takes the bf16 sum to one of its two neighbours, with
the chance that makes it right on average.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

COUNTS = (16, 64, 256, 1024)
Add = Callable[[Tensor, Tensor], Tensor]


def in_fp32(total: Tensor, term: Tensor) -> Tensor:
    return total.float().add_(term)


def in_bf16(total: Tensor, term: Tensor) -> Tensor:
    return total.add_(term)


def stochastic(total: Tensor, term: Tensor) -> Tensor:
    """The sum in fp32, rounded to bf16 up or down by chance: 16 random bits are added below the ones that stay."""
    exact = total.float().add_(term).view(torch.int32)
    exact.add_(torch.randint_like(exact, 2**16)).bitwise_and_(-(2**16))
    return exact.view(torch.float32).to(torch.bfloat16)


WAYS: dict[str, Add] = {"fp32": in_fp32, 'bf16 (sums="param")': in_bf16, "bf16, stochastic rounding": stochastic}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear 64x10": lambda: nn.Linear(64, 10),
    "MLP 64x128x10": lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)),
}


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters())))


def errors(make: Callable[[], nn.Module], count: int, seed: int) -> dict[str, float]:
    """The relative error of each way after `count` micro-batches of 4 rows."""
    torch.manual_seed(seed)
    model = make().bfloat16()
    x, y = torch.randn(4 * count, 64).bfloat16(), torch.randint(0, 10, (4 * count,))
    exact = make().double()
    exact.load_state_dict(model.state_dict())
    reference = torch.cat([grad.flatten() for grad in gradients(exact, x.double(), y)])
    terms = [[grad / count for grad in gradients(model, *part)] for part in zip(x.split(4), y.split(4), strict=True)]
    found = {}
    for name, add in WAYS.items():
        totals = [torch.zeros_like(grad) for grad in terms[0]]
        for grads in terms:
            totals = [add(total, grad) for total, grad in zip(totals, grads, strict=True)]
        summed = torch.cat([total.double().flatten() for total in totals])
        found[name] = float((summed - reference).norm() / reference.norm())
    return found


def seconds_of(add: Add, numbers: int = 4_000_000) -> float:
    """For adding one gradient of so many numbers."""
    total, term = torch.randn(numbers).bfloat16(), torch.randn(numbers).bfloat16()
    laps = []
    for _ in range(5):
        begin = time.perf_counter()
        add(total, term)
        laps.append(time.perf_counter() - begin)
    return statistics.median(laps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    for model, make in MODELS.items():
        print(f"\n| {model}, micro-batches | {' | '.join(WAYS)} |\n| --- | {' | '.join(['---'] * len(WAYS))} |")
        for count in COUNTS:
            seen = [errors(make, count, seed) for seed in range(arguments.seeds)]
            means = [statistics.mean(one[name] for one in seen) for name in WAYS]
            print(f"| {count} | {' | '.join(f'{mean:.4f}' for mean in means)} |")
    print(
        "\nmilliseconds to add 4 million numbers:",
        {name: round(1e3 * seconds_of(add), 1) for name, add in WAYS.items()},
    )


if __name__ == "__main__":
    main()
