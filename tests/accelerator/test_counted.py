"""Waits and copies of one update, counted for each option, and held: docs/benchmarks/devices.md has the same table."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from anybatch import Mean, Objective, PerRow, Tokens, Update, huggingface
from tests.accelerator.on_device import on_device
from tests.accelerator.plugged import Counted, counted, no_waits, plug
from tests.accelerator.setups import ROWS, batch, contrastive, mlp, trained, with_row_dropout

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "devices.md"
MICRO_BATCHES = 4
COLUMNS = 2
"""Inputs and targets: each is sent once per micro-batch."""
FEW = 2
"""The shares, for backward and for the loss that is reported: one small copy each."""
NORM = partial(mlp, nn.BatchNorm1d(16))
TWO_NORMS = partial(mlp, nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16))


def with_metrics() -> Objective:
    def loss(model: nn.Module, rows: object) -> tuple[torch.Tensor, dict[str, object]]:
        outputs = model(rows[0])
        hits = (outputs.argmax(1) == rows[1]).float()
        return nn.functional.cross_entropy(outputs, rows[1]), {"hits": Mean(hits.mean()), "each": PerRow(hits)}

    return Objective(loss, lambda rows: int((rows[1] != -100).sum()))


#        name                                   options                                        waits, copies to the device
TABLE: dict[str, tuple[dict[str, object], int, int]] = {
    'on_nonfinite="ignore"': ({}, 0, FEW),
    'on_nonfinite="raise" (default), "skip"': ({"on_nonfinite": "raise"}, 1, FEW),
    'on_nonfinite="drop"': ({"on_nonfinite": "drop"}, 21, FEW),
    "clip_norm, clip_value": ({"clip_norm": 0.1}, 0, FEW),
    "scaler=GradScaler(...)": ({"scaler": True, "on_nonfinite": "raise"}, 2, FEW),
    "autocast=torch.bfloat16": ({"autocast": torch.bfloat16}, 0, FEW),
    "prefetch=True": ({"prefetch": True}, 0, FEW),
    'batch_norm="micro"': ({"model": TWO_NORMS, "batch_norm": "micro"}, 0, FEW + 2),
    'batch_norm="exact"': ({"model": TWO_NORMS, "batch_norm": "exact", "offload": None}, 0, FEW + 2),
    'batch_norm="frozen"': ({"model": NORM, "batch_norm": "frozen"}, 0, FEW),
    "Coupled(...)": ({"objective": contrastive}, 0, FEW),
    "row_dropout(model)": ({"model": with_row_dropout}, 0, FEW + MICRO_BATCHES),
    "metrics: Mean, PerRow": ({"objective": with_metrics}, 0, FEW + 4),
}


def one_update(**options: object) -> Counted:
    """What the third update counts: by then nothing is made for the first time."""
    _, _, update = trained(plug(), updates=2, **{"on_nonfinite": "ignore", **copy.deepcopy(options)})
    before = counted()
    update(batch())
    return counted() - before


def line(name: str) -> str:
    options, waits, copies = TABLE[name]
    encoded = 2 * MICRO_BATCHES - 1 if "objective" in options and name.startswith("Coupled") else MICRO_BATCHES
    return f"| `{name}` | {waits} | {encoded} x {COLUMNS} | {copies} | 0 |"


@pytest.mark.parametrize("name", TABLE)
@on_device
def test_an_update_waits_and_copies_as_the_page_says(name):
    options, waits, copies = TABLE[name]
    seen = one_update(**options)
    forwards = 2 * MICRO_BATCHES - 1 if name.startswith("Coupled") else MICRO_BATCHES
    assert (seen.waits, seen.copies_to_device) == (waits, forwards * COLUMNS + copies), seen
    assert seen.copies_to_host == 0, "neither gradients nor activations"
    assert seen.unsafe_frees == 0
    assert line(name) in PAGE.read_text()


@on_device
def test_what_is_sent_is_the_batch_once_and_a_few_numbers():
    inputs, targets = batch()
    shares = 2 * MICRO_BATCHES * 4
    assert one_update().bytes_to_device == inputs.nbytes + targets.nbytes + shares


@on_device
def test_nothing_waits_inside_the_passes():
    for options in ({}, {"model": TWO_NORMS, "batch_norm": "exact"}, {"objective": contrastive}):
        _, _, update = trained(plug(), updates=2, **{**options, "on_nonfinite": "ignore"})
        with no_waits():
            update(batch())
        update.accumulator.objective = looking(update.accumulator.objective)
        with no_waits(), pytest.raises(RuntimeError, match=r"waits for the device \(item\)"):
            update(batch())


def looking(objective: object) -> object:
    """The same loss by somebody who prints it."""
    name = "encode" if hasattr(objective, "encode") else "loss"
    quiet = getattr(objective, name)

    def loud(model: nn.Module, rows: object) -> object:
        found = quiet(model, rows)
        (found[0] if isinstance(found, tuple) else found).sum().item()
        return found

    from dataclasses import replace

    return replace(objective, **{name: loud})


@on_device
def test_offloading_copies_what_it_puts_away_once_and_back():
    wide = partial(mlp, nn.BatchNorm1d(512), width=512)
    kept = one_update(model=wide, batch_norm="exact", offload=None)
    away = one_update(model=wide, batch_norm="exact", offload="host")
    assert kept.bytes_to_host == 0
    assert away.waits == 0
    activations = ROWS * 512 * 4
    assert activations <= away.bytes_to_host <= 4 * activations
    back = away.bytes_to_device - kept.bytes_to_device
    assert 0 < back <= 2 * away.bytes_to_host, (back, away.bytes_to_host)


@on_device
def test_a_batch_that_lies_on_the_device_costs_one_wait_for_its_units():
    device = plug()
    _, _, update = trained(device, updates=1, on_nonfinite="ignore")
    there = tuple(column.to(device) for column in batch())
    update(there)
    before = counted()
    update(there)
    seen = counted() - before
    assert (seen.waits, seen.copies_to_host, seen.copies_to_device) == (1, 1, FEW)
    assert seen.bytes_to_host == 8 * MICRO_BATCHES


@on_device
def test_tokens_of_a_language_model_are_cut_on_the_host_without_a_wait():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2, attn_implementation="eager")
    model = GPT2LMHeadModel(config).to(plug()).train()
    ids = torch.randint(0, 50, (12, 16))
    mask = (torch.arange(16) < torch.arange(4, 16).unsqueeze(1)).long()
    rows = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    update = Update(
        model, torch.optim.SGD(model.parameters(), lr=0.1), huggingface(), micro_batch=Tokens(64), on_nonfinite="ignore"
    )
    update(rows)
    update(rows)
    before = counted()
    update(rows)
    seen = counted() - before
    assert seen.copies_to_host == 0
    assert seen.waits <= MICRO_BATCHES, seen
