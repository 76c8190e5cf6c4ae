"""Twelve workloads that were written without a look at how `Fit` works, with batches of 20 sizes, the largest late."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Coupled, Objective, Update, huggingface, info_nce, supervised

ROWS = (31, 46, 38, 52, 29, 61, 44, 55, 17, 68, 50, 73, 63, 81, 58, 90, 77, 100, 35, 94)
"""Rows of each batch, in percent of the largest."""
LENGTHS = (70, 62, 78, 66, 85, 73, 90, 60, 80, 75, 88, 69, 93, 81, 97, 64, 90, 100, 72, 95)
"""The longest row of each batch, in percent of the longest of all."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A model to build, and batches to make for it."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    objective: Objective | Coupled
    batch: Callable[[int, int], Any]
    """Of so many rows, the longest of so many."""
    rows: int = field(kw_only=True)
    length: int = field(default=0, kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)

    def update(self, micro_batch: Any) -> Update:
        model = self.model()
        optimizer = self.optimizer(model.parameters())
        return Update(model, optimizer, self.objective, micro_batch=micro_batch, **self.options)

    def rows_of(self, number: int) -> int:
        return self.rows * ROWS[number] // 100

    def numbered(self, number: int) -> Any:
        """The batch of that update."""
        return self.batch(self.rows_of(number), self.length * LENGTHS[number] // 100)


class Added(nn.Module):
    """x + inner(x)."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Of(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def pooled(width: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]


def bottlenecks() -> nn.Module:
    def normed(into: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(into, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]

    layers = [*normed(3, 32, 3), nn.ReLU()]
    for width in (64, 128):
        layers += [*normed(width // 2, width, 3, 2), nn.ReLU()]
        for _ in range(2):
            inner = [*normed(width, width // 2, 1), nn.ReLU(), *normed(width // 2, width // 2, 3), nn.ReLU()]
            layers += [Added(*inner, *normed(width // 2, width, 1)), nn.ReLU()]
    return nn.Sequential(*layers, *pooled(128, 20))


def group_normed() -> nn.Module:
    layers: list[nn.Module] = []
    for into, out in ((3, 24), (24, 24), (24, 48), (48, 48), (48, 96), (96, 96)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU()]
        layers += [nn.MaxPool2d(2)] if into == out else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 36, 256), nn.SiLU(), nn.Dropout(0.3), nn.Linear(256, 20))


def inverted() -> nn.Module:
    def block(width: int) -> nn.Module:
        wide = 4 * width
        deep = nn.Conv2d(wide, wide, 5, padding=2, groups=wide)
        narrow = nn.Conv2d(wide, width, 1)
        return Added(nn.GroupNorm(1, width), nn.Conv2d(width, wide, 1), nn.Hardswish(), deep, nn.Hardswish(), narrow)

    down = nn.Conv2d(24, 48, 3, 2, 1)
    return nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), block(24), block(24), down, block(48), block(48), *pooled(48, 20))


class Segmenter(nn.Module):
    """A U-Net of three levels with InstanceNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.level(a, b) for a, b in ((1, width), (width, 2 * width), (2 * width, 4 * width)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width * n, width * n, 2, 2) for n in (2, 1))
        self.joined = nn.ModuleList(self.level(2 * width * n, width * n) for n in (2, 1))
        self.classes = nn.Conv2d(width, 4, 1)

    @staticmethod
    def level(into: int, out: int) -> nn.Module:
        both = [(nn.Conv2d(a, out, 3, 1, 1), nn.InstanceNorm2d(out, affine=True), nn.LeakyReLU()) for a in (into, out)]
        return nn.Sequential(*(layer for one in both for layer in one))

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        for up, joined, across in zip(self.up, self.joined, (second, first), strict=True):
            x = joined(torch.cat([up(x), across], 1))
        return self.classes(x)


def audio() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv1d(1, 48, 10, 5),
        nn.GELU(),
        nn.Conv1d(48, 96, 8, 4),
        nn.GroupNorm(8, 96),
        nn.GELU(),
    ]
    layers += [Added(nn.Conv1d(96, 96, 3, padding=1), nn.GELU(), nn.Conv1d(96, 96, 1)) for _ in range(4)]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(96, 35))


def lstm() -> nn.Module:
    mix = nn.LSTM(128, 192, 2, batch_first=True)
    head = [Of(lambda out: out[0]), nn.Linear(192, 1000), Of(lambda scores: scores.transpose(1, 2))]
    return nn.Sequential(nn.Embedding(1000, 128), mix, *head)


def gru() -> nn.Module:
    return nn.Sequential(
        nn.GRU(24, 160, 2, batch_first=True, dropout=0.2), Of(lambda out: out[0][:, -1]), nn.Linear(160, 12)
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 6) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def gpt(width: int = 192) -> nn.Module:
    layers: list[nn.Module] = [nn.Embedding(512, width)]
    for _ in range(4):
        layers += [Added(nn.LayerNorm(width), Attention(width))]
        layers += [Added(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
    return nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, 512))


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, targets = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 768}
    return BertForMaskedLM(BertConfig(vocab_size=2000, max_position_embeddings=256, **sizes)).train()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2000, intermediate_size=512, **sizes)).train()


def encoder(width: int = 128) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 512, batch_first=True, norm_first=True, activation="gelu")
    mixed = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(3000, width), mixed, Of(lambda x: x.mean(1)), nn.Linear(width, 96))


def mlp(width: int = 1024) -> nn.Module:
    inner = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Linear(200, width), *(layer for one in inner for layer in one), nn.Linear(width, 30))


def classes(*shape: int, kinds: int = 20) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    return lambda rows, _: (torch.randn(rows, *shape), torch.randint(0, kinds, (rows,)))


def ragged(vocabulary: int, masked: float = 1.0) -> Callable[[int, int], dict[str, Tensor]]:
    """Padded texts of many lengths; `masked` of the tokens are targets."""

    def made(rows: int, length: int) -> dict[str, Tensor]:
        lengths = torch.empty(rows).log_normal_(0, 0.5).mul_(length / 2).clamp_(8, length).long()
        lengths[0] = length
        mask = (torch.arange(length) < lengths[:, None]).long()
        ids = torch.randint(1, vocabulary, (rows, length)) * mask
        is_target = (mask == 1) & (torch.rand(rows, length) <= masked)
        is_target[:, 1] = True
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~is_target, -100)}

    return made


OF_CLASSES = supervised(nn.CrossEntropyLoss())
CAUSAL = Objective(next_token, units=lambda batch: (batch["labels"][:, 1:] != -100).sum())
PAIRED = Coupled(lambda model, pair: (model(pair[0]), model(pair[1])), info_nce(temperature=0.1))
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
WORKLOADS: dict[str, HeldOut] = {
    "ResNet, micro": HeldOut(
        bottlenecks,
        lambda held: SGD(held, 0.01, 0.9),
        OF_CLASSES,
        classes(3, 56, 56),
        rows=124,
        options={"batch_norm": "micro"},
    ),
    "CNN, GroupNorm": HeldOut(group_normed, lambda held: ADAMW(held, 1e-4), OF_CLASSES, classes(3, 48, 48), rows=150),
    "depthwise 5x5": HeldOut(
        inverted, lambda held: torch.optim.RMSprop(held, 1e-5), OF_CLASSES, classes(3, 64, 64), rows=90
    ),
    "U-Net, InstanceNorm": HeldOut(
        Segmenter,
        lambda held: torch.optim.Adam(held, 1e-4, amsgrad=True),
        OF_CLASSES,
        lambda rows, _: (torch.randn(rows, 1, 64, 64), torch.randint(0, 4, (rows, 64, 64))),
        rows=84,
    ),
    "audio, Conv1d": HeldOut(
        audio,
        lambda held: torch.optim.NAdam(held, 1e-5),
        OF_CLASSES,
        lambda rows, length: (torch.randn(rows, 1, length), torch.randint(0, 35, (rows,))),
        rows=96,
        length=12000,
    ),
    "LSTM": HeldOut(
        lstm,
        lambda held: SGD(held, 0.01, 0.9, nesterov=True),
        OF_CLASSES,
        lambda rows, length: (torch.randint(0, 1000, (rows, length)), torch.randint(0, 1000, (rows, length))),
        rows=260,
        length=64,
    ),
    "GRU, clip_norm": HeldOut(
        gru,
        lambda held: ADAMW(held, 1e-4),
        supervised(nn.SmoothL1Loss()),
        lambda rows, length: (torch.randn(rows, length, 24), torch.randn(rows, 12)),
        rows=860,
        length=40,
        options={"clip_norm": 1.0},
    ),
    "GPT, tokens": HeldOut(gpt, lambda held: ADAMW(held, 1e-4, fused=True), CAUSAL, ragged(512), rows=56, length=160),
    "BERT, bf16, tokens": HeldOut(
        bert,
        lambda held: torch.optim.Adam(held, 1e-4),
        huggingface(),
        ragged(2000, 0.15),
        rows=64,
        length=144,
        options={"autocast": torch.bfloat16},
    ),
    "Llama, Adafactor, tokens": HeldOut(
        llama, lambda held: torch.optim.Adafactor(held, 1e-3), huggingface(), ragged(2000), rows=48, length=160
    ),
    "coupled encoder": HeldOut(
        encoder,
        lambda held: ADAMW(held, 1e-4, foreach=False),
        PAIRED,
        lambda rows, length: tuple(torch.randint(0, 3000, (rows, length)) for _ in range(2)),
        rows=120,
        length=40,
    ),
    "MLP, drop": HeldOut(
        mlp,
        lambda held: torch.optim.Adagrad(held, 1e-3),
        OF_CLASSES,
        classes(200, kinds=30),
        rows=5000,
        options={"clip_norm": 1.0, "on_nonfinite": "drop"},
    ),
}
