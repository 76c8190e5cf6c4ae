"""The models that the benchmarks train."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class SmallTransformer(nn.Module):
    """Four layers of width 128 over 64 positions: about 1 M parameters."""

    def __init__(self, vocabulary: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))).transpose(1, 2)


class TokenModel(nn.Module):
    """An embedding, a GRU and a head: enough of a language model."""

    def __init__(self, vocabulary: int = 50, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens))[0]).transpose(1, 2)


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a way past them, as in ResNet."""

    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.past = nn.Identity()
        if stride != 1 or into != out:
            self.past = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x)
        y = self.norm1(y).relu()
        y = self.conv2(y)
        y = self.norm2(y)
        return (y + self.past(x)).relu()


class ResidualNet(nn.Module):
    """A ResNet of 20 BatchNorms: a stem, eight blocks of two, three on the ways past them."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [(width, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
        widths += [(2 * width, 4 * width, 2), (4 * width, 4 * width, 1), (4 * width, 8 * width, 2)]
        widths += [(8 * width, 8 * width, 1)]
        self.blocks = nn.Sequential(*(ResidualBlock(*shape) for shape in widths))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class SentenceEncoder(nn.Module):
    """Four transformer layers of width 128 with dropout; the first position stands for the sentence, as in BERT."""

    def __init__(self, vocabulary: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True) for _ in range(4)]
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor, *, is_checkpointed: bool = False) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
        return x[:, 0]


class LongAttention(nn.Module):
    """One layer of attention that keeps its matrix of length x length, as hand-written ones do."""

    def __init__(self, vocabulary: int = 256, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.ask, self.answer, self.tell = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        seen = (self.ask(x) @ self.answer(x).transpose(1, 2)).softmax(-1) @ self.tell(x)
        return self.head(x + seen).transpose(1, 2)


class Recurrent(nn.Module):
    """An embedding, an LSTM of two layers and a head."""

    def __init__(self, vocabulary: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens))[0]).transpose(1, 2)


class SmallUNet(nn.Module):
    """Down twice, up twice, with the ways across; one number per pixel. `twice(into, out)` makes two convolutions."""

    def __init__(self, width: int = 16, twice: Callable[[int, int], nn.Module] | None = None) -> None:
        super().__init__()
        twice = twice or _twice
        self.down1, self.down2 = twice(3, width), twice(width, 2 * width)
        self.bottom = twice(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join2, self.join1 = twice(4 * width, 2 * width), twice(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        lowest = self.bottom(nn.functional.max_pool2d(second, 2))
        middle = self.join2(torch.cat([self.up2(lowest), second], 1))
        return self.head(self.join1(torch.cat([self.up1(middle), first], 1)))


def _twice(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, 1, 1), nn.ReLU(), nn.Conv2d(out, out, 3, 1, 1), nn.ReLU())


class SmallViT(nn.Module):
    """Patches of 4 x 4, four transformer layers of width 64, a class token."""

    def __init__(self, width: int = 64, patches: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.zeros(1, patches + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.cut(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(patches), -1, -1), patches], 1) + self.place
        return self.head(self.layers(x)[:, 0])
