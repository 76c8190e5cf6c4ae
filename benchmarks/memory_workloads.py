"""Workloads whose memory is predicted and counted: those that predictions were built on. `memory_held_out` has the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Coupled, Objective, huggingface, info_nce, supervised
from benchmarks.models import Recurrent, ResidualNet, SentenceEncoder, SmallTransformer, SmallUNet

ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWorkload:
    """One update: a model, how it learns, what from, and its options."""

    model: nn.Module
    objective: Objective | Coupled
    batch: Any
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `Running`."""
    scaler: bool = False
    has_gradients: bool = False
    """True where gradients are there already, and there is no optimizer: `Accumulator` adds to them."""


Workloads = Mapping[str, Callable[[], MemoryWorkload]]
CLASSES = supervised(nn.CrossEntropyLoss())


def images(side: int = 32, channels: int = 3, classes: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, channels, side, side), torch.randint(0, classes, (ROWS,))


def tokens(length: int, vocabulary: int = 256) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, vocabulary, (ROWS, length))
    return drawn, drawn.roll(-1, 1)


def causal(length: int, vocabulary: int = 256) -> dict[str, Tensor]:
    drawn = torch.randint(0, vocabulary, (ROWS, length))
    return {"input_ids": drawn, "labels": drawn}


class ConvNeXtBlock(nn.Module):
    """A depthwise 7 x 7, then two pointwise layers, and a way past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.out, self.back = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(nn.functional.gelu(self.out(self.norm(self.depthwise(x)))))


def convnext(width: int = 32) -> nn.Module:
    blocks = [ConvNeXtBlock(width) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(nn.Conv2d(3, width, 2, 2), *blocks, *head)


def normed_twice(into: int, out: int) -> nn.Sequential:
    """Two convolutions of a U-Net, BatchNorm after each."""
    halves = [(nn.Conv2d(a, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()) for a in (into, out)]
    return nn.Sequential(*(layer for half in halves for layer in half))


def pairs(encoder: nn.Module, length: int) -> MemoryWorkload:
    batch = tuple(torch.randint(0, 256, (ROWS, length)) for _ in range(2))
    coupled = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce(temperature=0.5))
    return MemoryWorkload(model=encoder, objective=coupled, batch=batch)


def llama(*, heads: int = 8, key_heads: int = 2, layers: int = 4, width: int = 128) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=width, intermediate_size=3 * width, **shape))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=96, num_hidden_layers=3, state_size=8))


def mlp(width: int = 256) -> nn.Module:
    inner = [(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(64, width), *(layer for pair in inner for layer in pair), nn.Linear(width, 10))


def vectors() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 64), torch.randint(0, 10, (ROWS,))


BUILT_ON: Workloads = {
    "ResNet, micro": lambda: MemoryWorkload(
        model=ResidualNet(), objective=CLASSES, batch=images(), options={"batch_norm": "micro"}
    ),
    "ResNet, exact": lambda: MemoryWorkload(
        model=ResidualNet(), objective=CLASSES, batch=images(), options={"batch_norm": "exact"}
    ),
    "ConvNeXt, depthwise 7x7": lambda: MemoryWorkload(model=convnext(), objective=CLASSES, batch=images()),
    "U-Net with BatchNorm": lambda: MemoryWorkload(
        model=SmallUNet(twice=normed_twice),
        objective=supervised(nn.MSELoss()),
        batch=(images()[0], torch.randn(ROWS, 1, 32, 32)),
        options={"batch_norm": "micro"},
    ),
    "LSTM": lambda: MemoryWorkload(model=Recurrent(), objective=CLASSES, batch=tokens(32)),
    "Llama, GQA": lambda: MemoryWorkload(model=llama(), objective=huggingface(), batch=causal(64)),
    "Mamba": lambda: MemoryWorkload(model=mamba(), objective=huggingface(), batch=causal(24)),
    "coupled encoder": lambda: pairs(SentenceEncoder(), 32),
    "MLP, drop": lambda: MemoryWorkload(
        model=mlp(), objective=CLASSES, batch=vectors(), options={"on_nonfinite": "drop"}
    ),
    "GPT, gradients there": lambda: MemoryWorkload(
        model=SmallTransformer(), objective=CLASSES, batch=tokens(64), has_gradients=True
    ),
}
