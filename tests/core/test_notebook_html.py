"""What a notebook shows: tables, in which nothing that came from outside is markup."""

from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from anybatch import Accumulator, Cause, CutResult, Diagnosis, Finding, Objective, Update, Verdict, plan, supervised
from anybatch.app.records.schema import Trace, TracedLayer, TracedStage

EVIL = "<script>alert(1)</script>\"'&"
BATCH = (torch.ones(12, 3), torch.zeros(12, dtype=torch.long))


def evil_metrics(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), {EVIL: torch.tensor(1.0)}


def results():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield Update(model, optimizer, Objective(evil_metrics), micro_batch=4, check="off")(BATCH)
    yield Accumulator(model, Objective(evil_metrics), micro_batch=4).backward(BATCH)
    yield plan(model, optimizer, supervised(nn.CrossEntropyLoss()), BATCH, memory="1GiB")
    cut = CutResult(name=EVIL, precision="float64", micro_batches=3, rows=(4, 4, 4), error=0.5, parameters=())
    cause = Cause(kind="units", explanation=EVIL, fix=EVIL)
    yield Verdict(rows=12, rows_given=12, dtype="float32", cuts=(cut,), causes=(cause,), notes=(EVIL,))
    stage = TracedStage(stage="load", micro_batch=0, title=EVIL, facts={EVIL: EVIL, "rows": 4}, values=(1.0,))
    layer = TracedLayer(name=EVIL, kind="Linear", shapes_in=((4, 3),), shapes_out=((4, 2),), values=())
    finding = Finding(kind="mean", severity="error", file=EVIL, line=3, message=EVIL, fix=EVIL)
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
