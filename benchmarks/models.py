"""The models that the benchmarks train."""

from torch import Tensor, nn


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
