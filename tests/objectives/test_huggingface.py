"""huggingface(): heads of transformers, most of which ignore num_items_in_batch, against the whole batch in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from anybatch import (
    Accumulator,
    BatchError,
    Coupled,
    LossError,
    UnitsError,
    huggingface,
    num_rows,
    rows,
    take_rows,
)
from tests.reference import gradient, mean_of_means, relative_error

VOCABULARY, WIDTH, ROWS, LENGTH, CLASSES = 31, 16, 12, 10, 3
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    **{key: SMALL[key] for key in SMALL if "dropout" not in key},
    "num_key_value_heads": 2,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": CLASSES,
}
DISTIL = {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "dropout": 0.0}
DISTIL |= {"attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": CLASSES, "max_position_embeddings": 32}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
WHISPER = {key: SEQ2SEQ[key] for key in SEQ2SEQ if key not in ("max_position_embeddings", "num_labels")}
WHISPER |= {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32, "begin_suppress_tokens": None}
VISION = {"num_labels": CLASSES, "image_size": 8, "patch_size": 4, "num_channels": 3}


def token_labels(*, share_kept: float = 0.5) -> Tensor:
    """Ragged labels: later rows keep fewer tokens, and some rows keep their first, which a causal model does not predict."""
    labels = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    kept = torch.rand(ROWS, LENGTH) < torch.linspace(1.0, share_kept / 5, ROWS)[:, None]
    return labels.where(kept, -100)


def text() -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (ROWS, LENGTH)),
        "attention_mask": torch.ones(ROWS, LENGTH).long(),
    }


def next_token(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def each_token(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def classes(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, batch["labels"])


HEADS: dict[str, tuple[Any, Any, dict[str, Any], Callable[..., Tensor], str]] = {
    "GPT2LMHeadModel": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2, next_token, "tokens"),
    "LlamaForCausalLM": (hf.LlamaForCausalLM, hf.LlamaConfig, LLAMA, next_token, "tokens"),
    "BertLMHeadModel": (hf.BertLMHeadModel, hf.BertConfig, SMALL | {"is_decoder": True}, next_token, "tokens"),
    "BertForMaskedLM": (hf.BertForMaskedLM, hf.BertConfig, SMALL, each_token, "tokens"),
    "RobertaForMaskedLM": (hf.RobertaForMaskedLM, hf.RobertaConfig, SMALL, each_token, "tokens"),
    "DistilBertForMaskedLM": (hf.DistilBertForMaskedLM, hf.DistilBertConfig, DISTIL, each_token, "tokens"),
    "DebertaForMaskedLM": (hf.DebertaForMaskedLM, hf.DebertaConfig, SMALL, each_token, "tokens"),
    "BertForTokenClassification": (hf.BertForTokenClassification, hf.BertConfig, SMALL, each_token, "token classes"),
    "T5ForConditionalGeneration": (hf.T5ForConditionalGeneration, hf.T5Config, T5, each_token, "tokens"),
    "BartForConditionalGeneration": (hf.BartForConditionalGeneration, hf.BartConfig, SEQ2SEQ, each_token, "tokens"),
    "WhisperForConditionalGeneration": (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig,
        WHISPER,
        each_token,
        "speech",
    ),
    "BertForSequenceClassification": (hf.BertForSequenceClassification, hf.BertConfig, SMALL, classes, "classes"),
    "RobertaForSequenceClassification": (
        hf.RobertaForSequenceClassification,
        hf.RobertaConfig,
        SMALL,
        classes,
        "classes",
    ),
    "DistilBertForSequenceClassification": (
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig,
        DISTIL,
        classes,
        "classes",
    ),
    "DebertaForSequenceClassification": (
        hf.DebertaForSequenceClassification,
        hf.DebertaConfig,
        SMALL,
        classes,
        "classes",
    ),
    "GPT2ForSequenceClassification": (hf.GPT2ForSequenceClassification, hf.GPT2Config, GPT2, classes, "classes"),
    "LlamaForSequenceClassification": (hf.LlamaForSequenceClassification, hf.LlamaConfig, LLAMA, classes, "classes"),
    "ViTForImageClassification": (hf.ViTForImageClassification, hf.ViTConfig, SMALL | VISION, classes, "images"),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]:
    torch.manual_seed(3)
    head, config, settings, loss, kind = HEADS[name]
    model = head(config(**settings))
    model.train()
    batch = text()
    if kind == "tokens":
        batch["labels"] = token_labels()
    elif kind == "token classes":
        batch["labels"] = token_labels().clamp(max=CLASSES - 1)
    elif kind == "classes":
        batch["labels"] = torch.randint(0, CLASSES, (ROWS,))
    elif kind == "images":
        batch = {"pixel_values": torch.randn(ROWS, 3, 8, 8), "labels": torch.randint(0, CLASSES, (ROWS,))}
    else:
        batch = {"input_features": torch.randn(ROWS, 8, 20), "labels": token_labels()}
    return model, batch, loss


def whole_reference(model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor]) -> Tensor:
    """By hand from the logits, in float64 throughout: the models' own losses round logits to fp32."""
    import copy

    twin = copy.deepcopy(model).double()
    doubled = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    loss(twin(**doubled).logits, batch).backward()
    return gradient(twin.parameters())


@pytest.mark.parametrize("name", HEADS)
def test_the_accumulated_gradient_is_the_whole_batchs(name):
    model, batch, loss = build(name)
    reference = whole_reference(model, batch, loss)
    accumulated = Accumulator(model, huggingface(), micro_batch=3).backward(batch)
    assert relative_error(model, reference) < 2e-6
    assert accumulated.micro_batches == 4
    counted = batch["labels"][..., 1:] if loss is next_token else batch["labels"]
    assert accumulated.units == int((counted != -100).sum())


@pytest.mark.parametrize(
    "name", [name for name, head in HEADS.items() if head[-1] in ("tokens", "token classes", "speech")]
)
def test_the_mean_of_means_is_not(name):
    model, batch, loss = build(name)
    reference = whole_reference(model, batch, loss)
    parts = [{key: value[start : start + 3] for key, value in batch.items()} for start in range(0, ROWS, 3)]
    mean_of_means(model, lambda model, part: model(**part).loss, parts)
    assert relative_error(model, reference) > 0.1


def test_float_labels_are_averaged_over_their_elements():
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SMALL))
    batch = text() | {"labels": torch.rand(ROWS, CLASSES)}
    reference = whole_reference(
        model, batch, lambda logits, whole: F.binary_cross_entropy_with_logits(logits, whole["labels"].double())
    )
    assert Accumulator(model, huggingface(), micro_batch=5).backward(batch).units == ROWS * CLASSES
    assert relative_error(model, reference) < 2e-6


def test_question_answering_ignores_answers_beyond_the_text():
    torch.manual_seed(0)
    model = hf.BertForQuestionAnswering(hf.BertConfig(**SMALL | {"num_labels": 2}))
    positions = torch.arange(ROWS)
    batch = text() | {"start_positions": positions, "end_positions": positions}

    def loss(whole_model: nn.Module) -> Tensor:
        output = whole_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        inside = positions < LENGTH
        starts, ends = output.start_logits[inside], output.end_logits[inside]
        return (F.cross_entropy(starts, positions[inside]) + F.cross_entropy(ends, positions[inside])) / 2

    import copy

    twin = copy.deepcopy(model).double()
    loss(twin).backward()
    assert Accumulator(model, huggingface(), micro_batch=5).backward(batch).units == LENGTH
    assert relative_error(model, gradient(twin.parameters())) < 2e-6


def test_answers_cut_off_on_one_side_only_are_refused():
    batch = text() | {"start_positions": torch.tensor([1] * ROWS), "end_positions": torch.arange(ROWS)}
    with pytest.raises(UnitsError, match="12 start positions but 10 end positions lie within the 10 tokens"):
        huggingface().units(batch)


def test_a_head_with_two_losses_over_different_counts_is_refused_when_it_is_seen():
    torch.manual_seed(0)
    model = hf.BertForPreTraining(hf.BertConfig(**SMALL))
    batch = text() | {"labels": token_labels(), "next_sentence_label": torch.randint(0, 2, (ROWS,))}
    with pytest.raises(UnitsError, match=r"BertForPreTraining averaged its loss over \d+, 4 targets.*several losses"):
        Accumulator(model, huggingface(), micro_batch=4).backward(batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_head_that_does_not_shift_against_its_name_is_caught_and_mended_with_units():
    torch.manual_seed(0)
    config = hf.XLNetConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=1, n_head=2, d_inner=24, dropout=0.0)
    model, batch = hf.XLNetLMHeadModel(config), text() | {"labels": token_labels()}
    with pytest.raises(UnitsError, match=r"XLNetLMHeadModel averaged its loss over 30 targets.*count 27"):
        Accumulator(model, huggingface(), micro_batch=3).backward(batch | {"labels": torch.full((ROWS, LENGTH), 5)})
    reference = whole_reference(model, batch, each_token)
    mended = huggingface(units=lambda part: (part["labels"] != -100).sum())
    Accumulator(model, mended, micro_batch=3).backward(batch)
    assert relative_error(model, reference) < 2e-6


def test_a_loss_that_is_more_than_a_mean_over_labels_is_caught():
    torch.manual_seed(0)
    settings = {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**settings, router_aux_loss_coef=0.5))
    batch = text() | {"labels": token_labels()}
    with pytest.raises(UnitsError, match=r"MixtralForCausalLM returned a loss that adds something .* router's balance"):
        Accumulator(model, huggingface(), micro_batch=3).backward(batch)
    model.config.output_router_logits = False
    Accumulator(model, huggingface(), micro_batch=3).backward(batch)


MOE = {**LLAMA, "num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 1e-3}


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
def test_a_routers_balance_is_caught_however_little_it_adds(kind):
    torch.manual_seed(0)
    experts = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4, "decoder_sparse_step": 1}
    settings = {**MOE, **experts, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**settings))
    batch = text() | {"labels": token_labels()}
    output = model(**batch)
    added = float(output.aux_loss.detach()) * 1e-3 / float(output.loss.detach())
    assert 0 < added < 1e-3, "within the tolerance of before"
    with pytest.raises(UnitsError, match=rf"{kind}ForCausalLM returned a loss that adds something"):
        Accumulator(model, huggingface(), micro_batch=3).backward(batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_clip_is_told_to_be_coupled_and_is_exact_so():
    torch.manual_seed(0)
    tower = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    words = tower | {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}
    seen = tower | {"image_size": 8, "patch_size": 4}
    config = hf.CLIPConfig(text_config=words, vision_config=seen, projection_dim=8)
    model = hf.CLIPModel(config).double()
    batch = text() | {"pixel_values": torch.randn(ROWS, 3, 8, 8).double()}
    asked = batch | {"return_loss": True}
    for objective in (huggingface(), huggingface(units=rows)):
        with pytest.raises(
            LossError, match=r"return_loss asks for a contrastive loss.*use Coupled\(encode, clip_loss\(\)\)"
        ):
            Accumulator(model, objective, micro_batch=4).backward(asked)

    def encode(model: nn.Module, part: Any) -> Any:
        output = model(**part)
        return output.text_embeds, output.image_embeds, model.logit_scale

    def loss(seen: Any) -> Tensor:
        words, images, scale = seen
        similar = words @ images.T * scale.exp()
        own = torch.arange(len(words))
        return (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2

    model(**asked).loss.backward()
    reference = gradient(model.parameters())
    model.zero_grad()
    Accumulator(model, Coupled(encode, loss), micro_batch=4).backward(batch)
    assert relative_error(model, reference) <= 1e-12
    parts = [{key: value[start : start + 4] for key, value in batch.items()} for start in range(0, ROWS, 4)]
    mean_of_means(model, lambda model, part: model(**part, return_loss=True).loss, parts)
    assert relative_error(model, reference) > 0.1


def log_probability(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Of each row's answer, the tokens that are not ignored."""
    predicted, wanted = model(input_ids=ids).logits[:, :-1].log_softmax(-1), labels[:, 1:]
    chosen = predicted.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return (chosen * (wanted != -100)).sum(1)


def dpo_loss(model: nn.Module, batch: Any) -> Tensor:
    """As a preference trainer's `compute_loss`: a mean over pairs."""
    gains = [
        log_probability(model, batch[f"{side}_input_ids"], batch[f"{side}_labels"]) - batch[f"{side}_reference"]
        for side in ("chosen", "rejected")
    ]
    return -F.logsigmoid(0.1 * (gains[0] - gains[1])).mean()


def sft_loss(model: nn.Module, batch: Any) -> Tensor:
    """As a fine-tuning trainer's `compute_loss`: a mean over the tokens of answers."""
    return model(**batch).loss


def preferences() -> dict[str, Tensor]:
    sides = {side: text()["input_ids"] for side in ("chosen", "rejected")}
    batch = {f"{side}_input_ids": ids for side, ids in sides.items()}
    batch |= {f"{side}_labels": token_labels() for side in sides}
    return batch | {f"{side}_reference": -20 * torch.rand(ROWS) for side in sides}


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_trainers_loss_is_given_as_it_is_and_has_its_units(kind):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).double()
    batch = text() | {"labels": token_labels()} if kind == "sft" else preferences()
    compute = sft_loss if kind == "sft" else dpo_loss
    compute(model, batch).backward()
    reference = gradient(model.parameters())
    model.zero_grad()
    result = Accumulator(model, huggingface(loss=compute), micro_batch=5).backward(batch)
    assert result.units == (int((batch["labels"][:, 1:] != -100).sum()) if kind == "sft" else ROWS)
    assert relative_error(model, reference) <= (1e-6 if kind == "sft" else 1e-12), "the head's own loss is fp32"
    parts = [{key: value[start : start + 5] for key, value in batch.items()} for start in range(0, ROWS, 5)]
    mean_of_means(model, compute, parts)
    assert relative_error(model, reference) > 0.03


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_ctc_head_averages_or_sums_over_rows_as_its_configuration_says(reduction):
    torch.manual_seed(0)
    settings = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    settings |= {"intermediate_size": 24, "conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2)}
    settings |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
    settings |= {"layerdrop": 0.0, "activation_dropout": 0.0, "feat_extract_norm": "layer", "pad_token_id": 0}
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**settings, ctc_loss_reduction=reduction)).double().train()
    labels = torch.randint(3, VOCABULARY, (7, 5))
    labels[torch.arange(5) > torch.arange(7)[:, None] % 4] = -100
    batch = {"input_values": torch.randn(7, 120).double(), "labels": labels}
    model(**batch).loss.backward()
    reference = gradient(model.parameters())
    model.zero_grad()
    result = Accumulator(model, huggingface(), micro_batch=3).backward(batch)
    assert (result.units, result.micro_batches) == (7, 3)
    assert relative_error(model, reference) <= 1e-6, "the head computes its loss in fp32"
    parts = [{key: value[start : start + 3] for key, value in batch.items()} for start in range(0, 7, 3)]
    mean_of_means(model, lambda model, part: model(**part).loss, parts)
    assert relative_error(model, reference) > 0.1


def test_a_loss_that_cannot_be_seen_is_refused_and_mended_with_units():
    class ByHand(nn.Linear):
        def forward(self, labels: Tensor) -> Any:
            output = super().forward(labels)
            return hf.modeling_outputs.ModelOutput(loss=output.square().sum() / len(labels))

    model, batch = ByHand(2, 2), {"labels": torch.randn(6, 2)}
    with pytest.raises(UnitsError, match="ByHand computes its loss by none of torch's mean-reducing functions"):
        Accumulator(model, huggingface(), micro_batch=2).backward(batch)
    assert Accumulator(model, huggingface(units=rows), micro_batch=2).backward(batch).units == 6


def test_a_batch_without_labels_is_refused_with_its_keys():
    with pytest.raises(UnitsError, match=r"no tensor 'labels' \(keys: input_ids, attention_mask\)"):
        huggingface().units(text())


def test_a_batch_that_is_no_mapping_is_refused():
    with pytest.raises(BatchError, match=r"takes batches that are mappings.*got tuple"):
        huggingface().units((torch.zeros(2), torch.zeros(2)))


def test_a_model_that_returns_no_loss_is_refused_by_name():
    class Silent(nn.Linear):
        def forward(self, labels: Tensor) -> Tensor:
            return super().forward(labels)

    with pytest.raises(LossError, match=r"Silent returned no \.loss"):
        Accumulator(Silent(2, 2), huggingface(), micro_batch=2).backward({"labels": torch.randn(4, 2)})


def test_a_batch_encoding_of_transformers_is_cut_like_a_dict():
    whole = hf.BatchEncoding({"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(4)})
    part = take_rows(whole, [1, 3])
    assert isinstance(part, hf.BatchEncoding)
    assert part["labels"].tolist() == [1, 3]
    assert num_rows(whole) == 4, "the whole batch is left alone"
