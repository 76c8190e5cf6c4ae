"""The language model that the ragged benchmark trains."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mixing = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.attend(self.before_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mix(self.before_mixing(x))


class ByteGPTForCausalLM(nn.Module):
    """A GPT of 4 layers x 256 over bytes, 3 M parameters, with the interface of transformers' causal language models.

    Padding is on the right and attention looks back, so that the mask is not needed. Divides by `num_items_in_batch` where
    it is given, as the Hugging Face Trainer expects.
    """

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, longest: int = 1024) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.head(self.blocks(self.embed(input_ids) + self.place(places)))
        if labels is None:
            return CausalLMOutput(logits=logits)
        items = kwargs.get("num_items_in_batch")
        predicted, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(predicted, wanted, reduction="mean" if items is None else "sum")
        return CausalLMOutput(loss=loss if items is None else loss / items, logits=logits)
