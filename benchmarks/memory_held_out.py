"""Workloads written before predictions were changed, and not looked at while they were: `python -m benchmarks.memory_truth`.

Nothing may be tuned to them. What they gave first stands beside what they give now in docs/memory.md.
"""

from typing import Any

import torch
from torch import Tensor, nn

from anybatch import Coupled, huggingface, info_nce, supervised
from benchmarks.memory_workloads import (
    CLASSES,
    ROWS,
    MemoryWorkload,
    Workloads,
    causal,
    images,
    llama,
    pairs,
    tokens,
    vectors,
)


class BidirectionalGRU(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.GRU(width, width, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, drawn: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(drawn))[0]).transpose(1, 2)


def _separable(into: int, out: int, stride: int) -> nn.Sequential:
    depthwise = nn.Conv2d(into, into, 3, stride, 1, groups=into, bias=False)
    first = [depthwise, nn.BatchNorm2d(into), nn.ReLU6()]
    return nn.Sequential(*first, nn.Conv2d(into, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU6())


def mobilenet() -> nn.Module:
    shapes = [(24, 48, 1), (48, 96, 2), (96, 96, 1), (96, 192, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10)]
    return nn.Sequential(nn.Conv2d(3, 24, 3, 1, 1), *(_separable(*shape) for shape in shapes), *head)


class DenseNet(nn.Module):
    """Every layer sees all before it."""

    def __init__(self, growth: int = 12, layers: int = 6) -> None:
        super().__init__()
        widths = [16 + growth * layer for layer in range(layers)]
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, 1, 1)) for width in widths
        )
        self.head = nn.Linear(16 + growth * layers, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x.mean((2, 3)))


def wavenet(width: int = 48) -> nn.Module:
    dilated = [(nn.Conv1d(width, width, 3, padding=2**power, dilation=2**power), nn.Tanh()) for power in range(6)]
    layers = [nn.Conv1d(1, width, 1), *(layer for pair in dilated for layer in pair)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 10))


def autoencoder(width: int = 24) -> nn.Module:
    down = [nn.Conv2d(3, width, 5, 2, 2), nn.LeakyReLU(), nn.Conv2d(width, 2 * width, 5, 2, 2), nn.LeakyReLU()]
    up = [nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.LeakyReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)]
    return nn.Sequential(*down, *up)


def volumes() -> nn.Module:
    layers = [nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 16, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 10))


class LowRank(nn.Module):
    """A frozen linear layer and a learned product of two thin ones, as LoRA has it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def with_low_rank(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("q_proj", "v_proj"):
                setattr(module, name, LowRank(child))
    return model


def t5() -> MemoryWorkload:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=256, d_model=96, d_kv=16, d_ff=192, num_layers=3, num_heads=6, decoder_start_token_id=0
    )
    drawn = torch.randint(1, 256, (ROWS, 40))
    return MemoryWorkload(
        model=T5ForConditionalGeneration(config),
        objective=huggingface(),
        batch={"input_ids": drawn, "labels": drawn[:, :24].contiguous()},
        optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    )


def whisper() -> MemoryWorkload:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 50}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=256, num_mel_bins=40, max_target_positions=32, **layers, **sizes, **special)
    batch = {"input_features": torch.randn(ROWS, 40, 100), "labels": torch.randint(3, 256, (ROWS, 20))}
    return MemoryWorkload(model=WhisperForConditionalGeneration(config), objective=huggingface(), batch=batch)


def vit() -> MemoryWorkload:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192, image_size=32, patch_size=4
    )
    config.num_labels = 10
    drawn, labels = images()
    return MemoryWorkload(
        model=ViTForImageClassification(config),
        objective=huggingface(),
        batch={"pixel_values": drawn, "labels": labels},
        options={"clip_norm": 1.0},
    )


def bert() -> MemoryWorkload:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=256, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=192
    )
    config.num_labels = 4
    batch = {
        "input_ids": torch.randint(0, 256, (ROWS, 48)),
        "attention_mask": torch.ones(ROWS, 48, dtype=torch.long),
        "labels": torch.randint(0, 4, (ROWS,)),
    }
    return MemoryWorkload(
        model=BertForSequenceClassification(config),
        objective=huggingface(),
        batch=batch,
        options={"autocast": torch.bfloat16},
    )


def mixtral() -> MemoryWorkload:
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=256, hidden_size=64, intermediate_size=96, **shape)
    return MemoryWorkload(model=MixtralForCausalLM(config), objective=huggingface(), batch=causal(32))


def gpt_neox() -> MemoryWorkload:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=256, hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192
    )
    return MemoryWorkload(
        model=GPTNeoXForCausalLM(config),
        objective=huggingface(),
        batch=causal(48),
        options={"autocast": torch.float16},
        scaler=True,
    )


def checkpointed_qwen() -> MemoryWorkload:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, hidden_size=96, intermediate_size=192, **shape))
    model.gradient_checkpointing_enable()
    return MemoryWorkload(model=model, objective=huggingface(), batch=causal(48), options={"on_nonfinite": "drop"})


class TwoTowers(nn.Module):
    """Images and texts in one space; the images' tower has BatchNorm."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1)
        )
        self.texts = nn.EmbeddingBag(256, width)

    def forward(self, drawn: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.images(drawn).mean((2, 3)), self.texts(words)


def two_towers(**options: Any) -> MemoryWorkload:
    coupled = Coupled(lambda model, pair: model(*pair), info_nce(temperature=0.2))
    batch = images()[0], torch.randint(0, 256, (ROWS, 12))
    return MemoryWorkload(model=TwoTowers(), objective=coupled, batch=batch, options=options)


def coupled_bert() -> MemoryWorkload:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=256, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384
    )

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = BertModel(config)

        def forward(self, drawn: Tensor) -> Tensor:
            return self.inside(input_ids=drawn).last_hidden_state[:, 0]

    return pairs(Pooled(), 40)


def falcon_mamba() -> MemoryWorkload:
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    config = FalconMambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, state_size=8)
    return MemoryWorkload(model=FalconMambaForCausalLM(config), objective=huggingface(), batch=causal(20))


HELD_OUT: Workloads = {
    "GRU, bidirectional": lambda: MemoryWorkload(model=BidirectionalGRU(), objective=CLASSES, batch=tokens(32)),
    "MobileNet, exact": lambda: MemoryWorkload(
        model=mobilenet(), objective=CLASSES, batch=images(), options={"batch_norm": "exact"}
    ),
    "DenseNet, micro, SGD": lambda: MemoryWorkload(
        model=DenseNet(),
        objective=CLASSES,
        batch=images(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        options={"batch_norm": "micro"},
    ),
    "WaveNet, dilated": lambda: MemoryWorkload(
        model=wavenet(), objective=CLASSES, batch=(torch.randn(ROWS, 1, 512), torch.randint(0, 10, (ROWS,)))
    ),
    "autoencoder, drop": lambda: MemoryWorkload(
        model=autoencoder(),
        objective=supervised(nn.MSELoss()),
        batch=(images()[0],) * 2,
        options={"on_nonfinite": "drop"},
    ),
    "Conv3d, clip_value": lambda: MemoryWorkload(
        model=volumes(),
        objective=CLASSES,
        batch=(torch.randn(ROWS, 1, 12, 12, 12), torch.randint(0, 10, (ROWS,))),
        options={"clip_value": 0.5},
    ),
    "Llama, LoRA": lambda: MemoryWorkload(
        model=with_low_rank(llama(heads=4, key_heads=4)), objective=huggingface(), batch=causal(48)
    ),
    "T5, Adafactor": t5,
    "Whisper": whisper,
    "ViT, clip_norm": vit,
    "BERT, autocast": bert,
    "Mixtral": mixtral,
    "GPT-NeoX, fp16 with scaler": gpt_neox,
    "Qwen3, checkpointed, drop": checkpointed_qwen,
    "coupled towers, micro": lambda: two_towers(batch_norm="micro"),
    "coupled BERT": coupled_bert,
    "FalconMamba": falcon_mamba,
    "MLP, SGD, bf16": lambda: MemoryWorkload(
        model=nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(
            torch.bfloat16
        ),
        objective=CLASSES,
        batch=(vectors()[0].bfloat16(), vectors()[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ),
}
