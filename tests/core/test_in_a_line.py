"""What a person sees who types a name: one line; in a notebook, tables in which nothing from outside is markup."""

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import anybatch
from anybatch import (
    Accumulator,
    ArgumentsError,
    Cause,
    CutResult,
    Diagnosis,
    Finding,
    Fit,
    Objective,
    Rows,
    Tokens,
    Update,
    Verdict,
    plan,
    supervised,
    verify,
    windows,
)
from anybatch.app.records.schema import Trace, TracedLayer, TracedStage

MODEL = nn.Linear(4, 2)
BATCH = (torch.ones(40, 4), torch.arange(40) % 2)


def made(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Update(model, optimizer, supervised(nn.CrossEntropyLoss()), **{"micro_batch": 16} | options)


def test_an_update_shows_what_it_was_made_of_and_the_options_that_were_given():
    objective = "Objective(supervised(CrossEntropyLoss), units=supervised.units)"
    assert repr(made()) == f"Update(Linear, SGD, {objective}, micro_batch=Rows(size=16))"
    shown = repr(made(micro_batch=Tokens(512), clip_norm=1.0, on_nonfinite="skip", autocast=torch.bfloat16))
    options = "micro_batch=Tokens(512), autocast=torch.bfloat16, on_nonfinite='skip', clip_norm=1"
    assert shown == f"Update(Linear, SGD, {objective}, {options})"


def test_an_accumulator_and_what_it_cuts_by_after_memory_ran_out():
    accumulator = Accumulator(MODEL, Objective(lambda model, x: model(x).mean()), micro_batch=16)
    assert repr(accumulator).startswith("Accumulator(Linear, Objective(")
    accumulator.split = Rows(8)
    assert repr(accumulator).endswith("micro_batch=Rows(size=8))")


def test_a_result_is_numbers_and_leaves_out_what_did_not_happen():
    shown = repr(made()(BATCH))
    assert re.fullmatch(
        r"UpdateResult\(loss=0\.\d+, grad_norm=0\.\d+, units=40, micro_batches=3, applied=True, lr=0\.1\)", shown
    )
    with_metrics = supervised(
        nn.CrossEntropyLoss(), metrics=lambda out, y: {"norm": out.norm(), "rows": anybatch.PerRow(out)}
    )
    accumulated = Accumulator(MODEL, with_metrics, micro_batch=16).backward(BATCH)
    assert re.search(r"metrics=\{'norm': [\d.]+, 'rows': Tensor\(40, 2\)\}\)$", repr(accumulated))


@pytest.mark.parametrize(
    "thing",
    [
        Rows(16),
        Rows(16).cut(BATCH),
        Tokens(64),
        Fit("6GiB"),
        anybatch.Auto(most=8),
        windows([1, 2, 3], 2),
        anybatch.GlobalBatches(range(104), 64, rank=1, ranks=3),
        anybatch.Dealt(batch=BATCH, row_numbers=tuple(range(40)), num_rows=64),
        anybatch.Coupled(lambda model, x: model(x), anybatch.info_nce()),
        anybatch.huggingface(),
        supervised(nn.MSELoss(reduction="sum")),
        anybatch.Terms(lambda model, x: {"a": model(x).mean()}, units={"a": anybatch.rows}),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_everything_is_one_short_line_without_an_address(thing):
    shown = repr(thing)
    assert "\n" not in shown
    assert " at 0x" not in shown
    assert len(shown) < 300


def test_a_plan_says_what_fits_and_of_what():
    found = plan(
        MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()), BATCH, memory="1GiB"
    )
    assert re.fullmatch(
        r"Plan\(40 rows, peak [\d.]+ KiB of 870\.4 MiB, whole batch of 40 rows [\d.]+ KiB, fake tensors\)", repr(found)
    )


def test_a_verdict_is_a_line_and_its_text_a_paragraph_with_cause_and_fix():
    exact = verify(MODEL, supervised(nn.CrossEntropyLoss()), BATCH, micro_batch=16)
    assert re.fullmatch(r"Verdict\(exact, error \d\.\de-\d\d, 40 rows, \d+ cuts\)", repr(exact))
    assert str(exact).startswith("The accumulated gradient of 40 rows is the whole batch's, in ")
    wrong = verify(
        MODEL, Objective(lambda model, batch: model(batch[0]).sum(), units=lambda batch: 7), BATCH, micro_batch=16
    )
    assert repr(wrong).endswith(f", causes: {', '.join(cause.kind for cause in wrong.causes)})")
    assert " is not the whole batch's" in str(wrong)
    for cause in wrong.causes:
        assert cause.explanation in str(wrong)
        assert f"Fix: {cause.fix}" in str(wrong)
    assert "\n" not in str(wrong)


@pytest.mark.parametrize("kind", [Update, Accumulator])
def test_a_missing_micro_batch_says_what_to_write(kind):
    parts = (MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.1), supervised(nn.CrossEntropyLoss()))
    given = parts if kind is Update else (parts[0], parts[2])
    with pytest.raises(
        TypeError, match=rf"{kind.__name__}\(\) needs micro_batch.*Write micro_batch=16 .*\"auto\""
    ) as told:
        kind(*given)
    assert isinstance(told.value, ArgumentsError)


def test_a_mistyped_argument_or_choice_is_told_the_nearest():
    with pytest.raises(TypeError, match=r"Update\(\) has no argument 'clip_nrom'; did you mean clip_norm\?"):
        made(clip_nrom=1.0)
    with pytest.raises(anybatch.UpdateError, match=r"on_nonfinite='skp': expected one of .*; did you mean skip\?"):
        made(on_nonfinite="skp")
    with pytest.raises(anybatch.UpdateError, match=r"batch_norm='exat': .*, or None; did you mean exact\?"):
        made(batch_norm="exat")
    with pytest.raises(anybatch.UpdateError, match=r"check='frist': .*; did you mean first\?"):
        made(check="frist")
    with pytest.raises(anybatch.UpdateError, match=r"offload='dsik': .* or None; did you mean disk\?"):
        made(offload="dsik")


def test_a_mistyped_name_of_the_package_is_told_the_nearest():
    with pytest.raises(AttributeError, match=r"did you mean Update\?"):
        _ = anybatch.Updtae
    with pytest.raises(AttributeError, match=r"windows\.$"):
        _ = anybatch.banana


EVIL = "<script>alert(1)</script>\"'&"
NOTEBOOK_BATCH = (torch.ones(12, 3), torch.zeros(12, dtype=torch.long))


def evil_metrics(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), {EVIL: torch.tensor(1.0)}


def results():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield Update(model, optimizer, Objective(evil_metrics), micro_batch=4, check="off")(NOTEBOOK_BATCH)
    yield Accumulator(model, Objective(evil_metrics), micro_batch=4).backward(NOTEBOOK_BATCH)
    yield plan(model, optimizer, supervised(nn.CrossEntropyLoss()), NOTEBOOK_BATCH, memory="1GiB")
    cut = CutResult(name=EVIL, precision="float64", micro_batches=3, rows=(4, 4, 4), error=0.5, parameters=())
    cause = Cause(kind="units", explanation=EVIL, fix=EVIL)
    yield Verdict(rows=12, rows_given=12, dtype="float32", cuts=(cut,), causes=(cause,), notes=(EVIL,))
    stage = TracedStage(stage="load", micro_batch=0, title=EVIL, facts={EVIL: EVIL, "rows": 4}, values=(1.0,))
    layer = TracedLayer(name=EVIL, kind="Linear", shapes_in=((4, 3),), shapes_out=((4, 2),), values=())
    finding = Finding(kind="mean", severity="error", file=EVIL, line=3, message=EVIL, own_fix=EVIL)
    yield Diagnosis(findings=(finding,), loops=())
    yield Trace(stages=(stage,), layers=(layer,))


@pytest.mark.parametrize("result", list(results()), ids=lambda result: type(result).__name__)
def test_a_result_is_a_table_in_a_notebook_and_what_it_holds_is_text(result):
    page = ElementTree.fromstring(result._repr_html_())
    assert {element.tag for element in page.iter()} <= {
        *["div", "strong", "p", "table", "thead", "tbody", "tr", "th", "td"]
    }
    texts = [element.text or "" for element in page.iter()]
    assert any(text for text in texts)
    assert (EVIL in " ".join(texts)) == (type(result).__name__ != "Plan")
    assert "\n" not in repr(result)
