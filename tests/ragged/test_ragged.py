"""Ragged batches cut by Tokens: the whole padded batch's gradient, for models that do not look at padding."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from anybatch import Accumulator, Auto, Cost, Objective, PerRow, Rows, Tokens, Update, huggingface, supervised
from tests.core.test_accumulator import TokenModel, ragged_tokens
from tests.objectives.test_huggingface import GPT2, LLAMA, SMALL, VOCABULARY, each_token, next_token, whole_reference
from tests.reference import gradient, mean_of_means, relative_error, whole_batch_gradient

EXACT_FP32, EXACT_FP64 = 5e-7, 1e-14
ROWS = 24


def text(*, masked: bool = False, left: bool = False) -> dict[str, Tensor]:
    """Rows of log-normal length; a masked language model's labels count at few places, and in some rows nowhere."""
    lengths = torch.empty(ROWS).log_normal_(2, 0.8).clamp(2, 30).long()
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    mask = mask.flip(1) if left else mask
    ids = torch.randint(3, VOCABULARY, mask.shape) * mask
    is_ignored = (mask == 0) | (torch.rand(mask.shape) > 0.25) if masked else mask.cumsum(1) * mask < 2
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(is_ignored, -100)}
    return batch | ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if left else {})


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, bool], Callable[..., Tensor]]] = {
    "Llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), {}, next_token),
    "Llama, padded on the left": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), {"left": True}, next_token),
    "GPT-2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), {}, next_token),
    "Bert, masked": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)), {"masked": True}, each_token),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor]]:
    torch.manual_seed(5)
    make, kind, loss = CASES[name]
    return make().train(), text(**kind), loss


@pytest.mark.parametrize(
    "split", [Rows(5), Tokens(40), Tokens(40, cost=Cost(fixed=0.0)), Tokens(10_000), Auto()], ids=repr
)
@pytest.mark.parametrize("name", CASES)
def test_however_it_is_cut_the_gradient_is_the_whole_padded_batchs(name, split):
    model, batch, loss = build(name)
    reference = whole_reference(model, batch, loss)
    Accumulator(model, huggingface(), micro_batch=copy.deepcopy(split)).backward(batch)
    assert relative_error(model, reference) < EXACT_FP32


@pytest.mark.parametrize("name", CASES)
def test_in_float64_it_is_equal_to_rounding(name):
    model, batch, loss = build(name)
    reference = whole_reference(model, batch, loss)

    def from_logits(twin: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return loss(twin(**{key: value for key, value in part.items() if key != "labels"}).logits, part)

    def units(part: dict[str, Tensor]) -> Tensor:
        return (part["labels"][:, 1:] if loss is next_token else part["labels"]).ne(-100).sum()

    model.double()
    Accumulator(model, Objective(from_logits, units), micro_batch=Tokens(40)).backward(batch)
    assert relative_error(model, reference) < EXACT_FP64


@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_means_of_the_same_micro_batches_is_not(name):
    model, batch, loss = build(name)
    reference = whole_reference(model, batch, loss)
    parts = [part for part in Tokens(40).cut(batch) if (part["labels"][:, 1:] != -100).any()]
    mean_of_means(model, lambda twin, part: twin(**part).loss, parts)
    assert relative_error(model, reference) > 0.05


def test_left_padding_trimmed_without_positions_would_be_wrong():
    model, batch, loss = build("Llama, padded on the left")
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)).train()
    del batch["position_ids"]
    reference = whole_reference(model, batch, loss)
    with pytest.warns(UserWarning, match="without position_ids"):
        Accumulator(model, huggingface(), micro_batch=Tokens(120)).backward(batch)
    assert relative_error(model, reference) < EXACT_FP32
    model.zero_grad()
    spans = batch["attention_mask"].sum(1)
    trimmed = [{key: value[row : row + 1, -int(spans[row]) :] for key, value in batch.items()} for row in range(ROWS)]
    units = [(part["labels"][:, 1:] != -100).sum() for part in trimmed]
    for part, own in zip(trimmed, units, strict=True):
        if own > 0:
            (model(**part).loss * own / sum(units)).backward()
    assert relative_error(model, reference) > 0.01


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), budget=st.integers(80, 600), fixed=st.sampled_from([0.0, 5.0, 500.0]))
def test_plain_torch_with_lengths_of_the_users_own(seed, budget, fixed):
    torch.manual_seed(seed)
    model, batch = TokenModel(), ragged_tokens(16)
    criterion = nn.CrossEntropyLoss()
    reference = whole_batch_gradient(model, lambda twin, whole: criterion(twin(whole[0]), whole[1]), batch)
    split = Tokens(budget, length=lambda pair: (pair[1] != -100).sum(1), cost=Cost(fixed=fixed))
    Accumulator(model, supervised(criterion), micro_batch=split).backward(batch)
    assert relative_error(model, reference) < EXACT_FP32


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Raw samples: lists of tokens, as a tokenizer leaves them."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        lengths = batch["attention_mask"].sum(1).tolist()
        self.samples = [
            {key: batch[key][row, :length].tolist() for key in ("input_ids", "labels")}
            for row, length in enumerate(lengths)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.samples[row]


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": 0, "labels": -100}
    batch = {
        key: torch.tensor([sample[key] + [value] * (longest - len(sample[key])) for sample in samples])
        for key, value in fill.items()
    }
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    return batch | {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def test_raw_samples_collated_per_micro_batch_give_the_same_gradient():
    model, batch, loss = build("Llama")
    reference = whole_reference(model, batch, loss)
    loader = DataLoader(Samples(batch), batch_size=ROWS, collate_fn=list)
    accumulator = Accumulator(model, huggingface(), micro_batch=Tokens(40, collate=collate))
    for samples in loader:
        assert accumulator.backward(samples).micro_batches > 3
    assert relative_error(model, reference) < EXACT_FP32


def test_updates_cut_by_tokens_and_by_rows_leave_the_same_weights():
    ends = []
    for split in (Rows(ROWS), Tokens(40), Auto(most=Tokens(120))):
        model, batch, _ = build("Bert, masked")
        update = Update(
            model, torch.optim.SGD(model.parameters(), lr=0.1), huggingface(), micro_batch=split, clip_norm=1.0
        )
        for _ in range(5):
            update(batch)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for end in ends[1:]:
        assert float((end - ends[0]).norm() / ends[0].norm()) < 5e-7


def row_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    each = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    counts = batch["labels"].ne(-100).sum(1)
    own = each.sum(1) / counts.clamp(min=1)
    return each.sum() / counts.sum(), {"loss of row": PerRow(own), "tokens": PerRow(batch["attention_mask"].sum(1))}


ROW_LOSS = Objective(row_loss, units=lambda batch: batch["labels"].ne(-100).sum())


@pytest.mark.parametrize("split", [Rows(5), Tokens(40)], ids=repr)
def test_what_is_returned_per_row_comes_back_in_the_batchs_own_order(split):
    model, batch, _ = build("Bert, masked")
    batch["labels"][:, 0] = batch["input_ids"][:, 0]
    metrics = Accumulator(model, ROW_LOSS, micro_batch=split).backward(batch).metrics
    _, whole = row_loss(model, batch)
    assert torch.allclose(metrics["loss of row"], whole["loss of row"].values.detach(), atol=1e-5)
    assert metrics["tokens"].tolist() == batch["attention_mask"].sum(1).tolist()
    assert not metrics["loss of row"].requires_grad
    order = [row for rows in Tokens(40).cut(batch).row_numbers for row in rows]
    assert order != sorted(order), "the rows did run in another order"


def test_rows_without_a_target_come_back_too():
    model, batch, _ = build("Bert, masked")
    lengths = batch["attention_mask"].sum(1)
    batch["labels"][lengths <= 6] = -100
    metrics = Accumulator(model, ROW_LOSS, micro_batch=Tokens(32, cost=Cost(fixed=0.0))).backward(batch).metrics
    assert torch.equal(metrics["tokens"], lengths)
    assert bool((metrics["loss of row"][lengths <= 6] == 0).all())


def test_rows_of_a_dropped_micro_batch_are_nan():
    model, x = nn.Linear(3, 1), torch.arange(18.0).reshape(6, 3)
    x[3, 0] = torch.inf
    objective = Objective(lambda model, part: (model(part).square().mean(), {"first": PerRow(part[:, 1])}))
    accumulated = Accumulator(model, objective, micro_batch=2, drop_nonfinite=True).backward(x)
    assert accumulated.dropped == (1,)
    assert accumulated.metrics["first"].isnan().tolist() == [False, False, True, True, False, False]


def test_what_differs_in_length_between_micro_batches_is_refused_with_the_shapes():
    model, batch, _ = build("Bert, masked")

    def per_token(twin: nn.Module, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        return row_loss(twin, part)[0], {"ids": PerRow(part["input_ids"])}

    with pytest.raises(
        Exception, match=r"the metric 'ids' has shape \(.*PerRow takes one entry per row, all of one shape"
    ):
        Accumulator(model, Objective(per_token, ROW_LOSS.units), micro_batch=Tokens(40)).backward(batch)


def test_gradients_of_frozen_and_unused_parameters_stay_none():
    model, batch, loss = build("Llama")
    model.lm_head.weight.requires_grad_(False)
    reference = whole_reference(model, batch, loss)
    Accumulator(model, huggingface(), micro_batch=Tokens(40)).backward(batch)
    assert relative_error(model, reference) < EXACT_FP32
    assert model.lm_head.weight.grad is None
    assert gradient(model.parameters()).shape == reference.shape
