"""What `verify` costs where it says exact: in updates of the same batch, and in weights beyond what an update holds.

    python -m benchmarks.proof_cost

Medians of processor times, in one thread; memory is that of tensors, read off the profiler's allocation events.
"""

import copy
import statistics
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from anybatch import Objective, Update, huggingface, verify
from benchmarks.meter import peak_bytes
from benchmarks.models import SmallTransformer

Work = tuple[nn.Module, Any, Any]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1])


def perceptron(width: int = 256, dropout: float = 0.0, rows: int = 64) -> Work:
    layers = [
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    return nn.Sequential(*layers), Objective(loss_of), (torch.randn(rows, 64), torch.randint(0, 10, (rows,)))


def convolutions() -> Work:
    def block(inside: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(), nn.MaxPool2d(2)]

    model = nn.Sequential(*block(3, 16), *block(16, 32), nn.Flatten(), nn.Linear(32 * 64, 10))
    return model, Objective(loss_of), (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))


def transformer() -> Work:
    return SmallTransformer(), Objective(loss_of), (torch.randint(0, 256, (64, 64)), torch.randint(0, 256, (64, 64)))


def llama() -> Work:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=512, num_key_value_heads=4, **sizes)).train()
    words = torch.randint(3, 512, (32, 48))
    return model, huggingface(), {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.clone()}


WORKS: dict[str, Callable[[], Work]] = {
    "MLP 64-256-256-10, 64 rows": perceptron,
    "the same with dropout": lambda: perceptron(dropout=0.2),
    "CNN with GroupNorm, 32 images": convolutions,
    "small transformer, 64 rows of 64": transformer,
    "Llama 128 x 2, 32 rows of 48": llama,
}


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = process_time()
        work()
        times.append(process_time() - begin)
    return statistics.median(times)


def updates_of(work: Work) -> float:
    """How many updates a verdict takes."""
    model, objective, batch = work
    micro_batch = 8
    trained = copy.deepcopy(model)
    update = Update(trained, torch.optim.AdamW(trained.parameters()), objective, micro_batch=micro_batch, check="off")
    one = seconds_of(lambda: update(batch), 7)

    def verified() -> None:
        assert verify(model, objective, batch, micro_batch=micro_batch).is_exact

    return seconds_of(verified, 3) / one


def weights_beyond() -> tuple[float, float]:
    """The peak of an update and of a verdict, in bytes of the weights, for a model that is nearly nothing but weights."""
    model, objective, batch = perceptron(width=2048, rows=8)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    update = Update(model, optimizer, objective, micro_batch=4, check="off")
    update(batch)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    held = [*model.parameters(), *states]
    model.zero_grad()
    in_update = peak_bytes(lambda: update(batch), held)
    model.zero_grad()
    in_proof = peak_bytes(lambda: verify(model, objective, batch, micro_batch=4), held)
    return in_update / weights, in_proof / weights


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, make in WORKS.items():
        print(f"{name:36} {updates_of(make()):5.1f} updates", flush=True)
    in_update, in_proof = weights_beyond()
    print(f"peak, in weights: update {in_update:.1f}, verify {in_proof:.1f}, which is {in_proof - in_update:.1f} more")


if __name__ == "__main__":
    main()
