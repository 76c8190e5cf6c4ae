"""Heads of transformers, tiny: a model, rows for it, and how they are collated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

VOCABULARY = 50
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "pad_token_id": 0,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = TEXT | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "pad_token_id": 0,
    "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A class of transformers, as the Trainer is given it."""

    model: str
    config: dict[str, Any]
    rows: Callable[[int], Rows]
    has_batch_norm: bool = False

    def make(self) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        cls = getattr(transformers, self.model)
        model: nn.Module = cls(cls.config_class(**self.config))
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        return model


def _lengths(count: int) -> list[int]:
    torch.manual_seed(1)
    return torch.randint(4, 30, (count,)).tolist()


def _text(count: int) -> list[Tensor]:
    return [torch.randint(3, VOCABULARY, (length,)) for length in _lengths(count)]


def next_tokens(count: int) -> Rows:
    return [{"input_ids": text, "labels": text} for text in _text(count)]


def masked(count: int) -> Rows:
    return [
        {"input_ids": text, "labels": torch.where(torch.rand(len(text)) < 0.3, text, -100)} for text in _text(count)
    ]


def classes(count: int) -> Rows:
    return [{"input_ids": text, "labels": torch.randint(0, 3, ())} for text in _text(count)]


def tags(count: int) -> Rows:
    return [{"input_ids": text, "labels": torch.randint(0, 3, (len(text),))} for text in _text(count)]


def answers(count: int) -> Rows:
    """Of one length: the softmax is over all positions, so that padding counts."""
    torch.manual_seed(1)
    texts = torch.randint(3, VOCABULARY, (count, 12))
    places = torch.randint(0, 6, (count, 2))
    return [
        {"input_ids": text, "start_positions": start, "end_positions": start + length}
        for text, (start, length) in zip(texts, places, strict=True)
    ]


def choices(count: int) -> Rows:
    torch.manual_seed(1)
    return [
        {"input_ids": torch.randint(3, VOCABULARY, (4, 8)), "labels": torch.randint(0, 4, ())} for _ in range(count)
    ]


def translations(count: int) -> Rows:
    return [{"input_ids": text, "labels": text.flip(0)[: len(text) // 2 + 1]} for text in _text(count)]


def images(count: int) -> Rows:
    torch.manual_seed(1)
    return [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.randint(0, 3, ())} for _ in range(count)]


def speech(count: int) -> Rows:
    torch.manual_seed(1)
    return [
        {"input_features": torch.randn(8, 20), "labels": torch.randint(3, VOCABULARY, (length // 4 + 1,))}
        for length in _lengths(count)
    ]


def collate(rows: Rows) -> dict[str, Tensor]:
    """Padded on the right, labels with what is ignored."""
    batch: dict[str, Tensor] = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if key == "input_ids" and values[0].dim() == 1:
            batch[key] = pad_sequence(values, batch_first=True)
            batch["attention_mask"] = (batch[key] > 0).long()
        elif key == "labels" and values[0].dim() == 1:
            batch[key] = pad_sequence(values, batch_first=True, padding_value=-100)
        else:
            batch[key] = torch.stack(values)
    return batch


HEADS = [
    Head(model="LlamaForCausalLM", config=LLAMA, rows=next_tokens),
    Head(model="GPT2LMHeadModel", config=GPT2, rows=next_tokens),
    Head(model="BertForMaskedLM", config=TEXT | STILL, rows=masked),
    Head(model="BertForSequenceClassification", config=TEXT | STILL | {"num_labels": 3}, rows=classes),
    Head(model="BertForTokenClassification", config=TEXT | STILL | {"num_labels": 3}, rows=tags),
    Head(model="BertForQuestionAnswering", config=TEXT | STILL, rows=answers),
    Head(model="BertForMultipleChoice", config=TEXT | STILL, rows=choices),
    Head(model="RobertaForSequenceClassification", config=TEXT | STILL | {"num_labels": 3}, rows=classes),
    Head(
        model="DistilBertForSequenceClassification",
        config={"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2, "dropout": 0.0,
                "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 3},
        rows=classes,
    ),
    Head(model="DebertaV2ForSequenceClassification", config=TEXT | STILL | {"num_labels": 3}, rows=classes),
    Head(model="GPT2ForSequenceClassification", config=GPT2 | {"num_labels": 3}, rows=classes),
    Head(model="LlamaForSequenceClassification", config=LLAMA | {"num_labels": 3}, rows=classes),
    Head(
        model="T5ForConditionalGeneration",
        config={"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2,
                "dropout_rate": 0.0, "decoder_start_token_id": 0},
        rows=translations,
    ),
    Head(model="BartForConditionalGeneration", config=SEQ2SEQ, rows=translations),
    Head(
        model="WhisperForConditionalGeneration",
        config=SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32},
        rows=speech,
    ),
    Head(
        model="ViTForImageClassification",
        config=STILL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                        "image_size": 16, "patch_size": 8, "num_labels": 3},
        rows=images,
    ),
    Head(
        model="ResNetForImageClassification",
        config={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
        rows=images,
        has_batch_norm=True,
    ),
    Head(
        model="ConvNextForImageClassification",
        config={"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3, "patch_size": 4},
        rows=images,
    ),
]  # fmt: skip
