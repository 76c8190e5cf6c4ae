"""The harness of the table: its reference is right, it sees what is wrong, and it sees nothing wrong where nothing is."""

import json
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.table.case import LR
from benchmarks.table.cases import all_cases, rows
from benchmarks.table.collect import run
from benchmarks.table.contenders import CONTENDERS, Learnt, at_once, textbook, with_anybatch
from benchmarks.table.judge import judge
from benchmarks.table.pages import BEGIN, END, from_json, markdown, replace_table, to_json
from benchmarks.table.picture import EXACT, colour_of, draw
from benchmarks.table.reference import whole_batch
from benchmarks.table.worker import watch

DOCS = Path(__file__).parent.parent.parent / "docs"
CASES = all_cases()
ALONE = [case for case in CASES if case.ranks == 1 and case.kind == "any"]


def judged(case, learn):
    return judge(case, [watch(case, learn)])


def test_the_reference_is_the_gradient_of_softmax_regression_in_closed_form():
    case = rows.uneven_tail()
    update = watch(case, at_once.learn).updates[15]
    x = torch.stack([row[0] for row in case.rows[960:]]).double()
    y = torch.nn.functional.one_hot(torch.stack([row[1] for row in case.rows[960:]]), 2).double()
    weight, bias = (tensor.double() for tensor in update.weights)
    residual = ((x @ weight.T + bias).softmax(1) - y) / 40
    wanted = torch.cat([(residual.T @ x).flatten(), residual.sum(0)])
    found = whole_batch(case, update, range(960, 1000)).gradient
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-15)


def test_the_reference_is_clipped_where_the_case_clips():
    case = replace(rows.uneven_tail(), clip_norm=0.01)
    update = watch(case, at_once.learn).updates[0]
    assert float(whole_batch(case, update, range(64)).gradient.norm()) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_anybatch_is_exact(case):
    outcome = judged(case, with_anybatch.learn)
    assert outcome.is_exact, outcome
    assert outcome.updates == len(case.wanted())


@pytest.mark.parametrize(
    "case", [case for case in ALONE if case.rows[0].__class__ is tuple], ids=lambda case: case.name
)
def test_the_whole_batch_at_once_is_exact(case):
    outcome = judged(case, at_once.learn)
    assert outcome.is_exact, outcome


@pytest.mark.parametrize(
    "case", [case for case in ALONE if "full micro-batches" not in case.name], ids=lambda case: case.name
)
def test_the_textbook_loop_is_not(case):
    outcome = judged(case, textbook.learn)
    assert not outcome.is_exact
    is_lost = outcome.dropped == 40 or outcome.lr != outcome.wanted_lr
    assert is_lost or outcome.error > (5e-3 if "bf16" in case.name else 0.1)


def test_the_textbook_loop_is_exact_where_all_micro_batches_are_alike():
    assert judged(next(case for case in ALONE if "full micro-batches" in case.name), textbook.learn).is_exact


def test_the_loss_of_a_tail_and_a_schedule_that_does_not_end_are_seen():
    case = next(case for case in ALONE if case.is_scheduled and not case.is_scaled)
    outcome = judged(case, textbook.learn)
    assert (outcome.updates, outcome.wanted_updates, outcome.dropped) == (15, 16, 40)
    assert (outcome.lr, outcome.scheduler_steps) == (pytest.approx(1 / 16), 15)


def test_a_row_that_is_learnt_from_twice_and_one_of_double_weight_are_seen():
    def planted(case, model, optimizer):
        for batch in case.loader(case.batch):
            optimizer.zero_grad()
            case.loss(model, batch).backward()
            first = tuple(column[:1] for column in batch)
            (case.loss(model, first) / len(batch[0])).backward()
            optimizer.step()
        return Learnt()

    outcome = judged(rows.uneven_tail(), planted)
    assert (outcome.repeated, outcome.misweighted, outcome.dropped) == (16, 16, 0)
    assert outcome.error > 5e-3


def test_a_gradient_of_twice_the_size_is_an_error_of_1_with_every_row_weighted_wrongly():
    def planted(case, model, optimizer):
        for batch in case.loader(case.batch):
            optimizer.zero_grad()
            (2 * case.loss(model, batch)).backward()
            optimizer.step()
        return Learnt()

    outcome = judged(rows.uneven_tail(), planted)
    assert outcome.error == pytest.approx(1, abs=1e-6)
    assert (outcome.misweighted, outcome.repeated, outcome.dropped) == (1000, 0, 0)


def test_an_update_that_takes_the_inf_is_seen():
    def planted(case, model, optimizer):
        return at_once.learn(replace(case, is_scaled=False), model, optimizer)

    outcome = judged(rows.an_inf(), planted)
    assert outcome.updates == 16
    assert outcome.nonfinite == 11


def test_a_window_that_was_zeroed_and_not_stepped_counts_as_dropped():
    def planted(case, model, optimizer):
        for index, batch in enumerate(case.loader(case.batch)):
            optimizer.zero_grad()
            case.loss(model, batch).backward()
            if index != 3:
                optimizer.step()
        return Learnt()

    outcome = judged(rows.uneven_tail(), planted)
    assert (outcome.updates, outcome.dropped, outcome.repeated) == (15, 64, 0)
    assert outcome.error < outcome.limit


def test_the_trainer_with_anybatch_is_exact_over_two_ranks_that_torchrun_starts():
    number = next(number for number, case in enumerate(CASES) if case.name == "two ranks, 1,000 rows")
    contender = next(contender for contender in CONTENDERS if contender.title == "HF Trainer + anybatch")
    [(_, outcome)] = run(contender, CASES, [number], 2)
    assert outcome.is_exact, outcome
    assert outcome.updates == 16


def test_a_process_that_fails_is_an_error_with_its_last_words():
    contender = replace(CONTENDERS[0], module="no_such_contender")
    with pytest.raises(RuntimeError, match="no_such_contender"):
        list(run(contender, CASES, [0], 1))


def small_table():
    case = rows.uneven_tail()
    return {case.name: {"textbook loop": judged(case, textbook.learn), "anybatch": judged(case, at_once.learn)}}


def test_the_table_is_the_same_from_json():
    table = small_table() | {"another": {"textbook loop": "one process only", "anybatch": "one process only"}}
    again = from_json(json.loads(json.dumps(to_json(table), allow_nan=False)))
    assert markdown(again, {}, "today") == markdown(table, {}, "today")


def test_the_markdown_says_what_was_lost_and_sets_only_the_exact_in_bold():
    table = small_table()
    [cells] = table.values()
    text = markdown(table, {"torch": "2"}, "2026-11-16")
    assert f"15/16 updates; 40 rows dropped | **{cells['anybatch'].error:.1e}** |" in text
    assert "Measured on 2026-11-16 on a CPU with torch 2." in text


def test_only_the_table_of_the_page_is_replaced():
    assert replace_table(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"


def test_the_picture_is_green_only_where_all_is_exact():
    table = small_table()
    [(name, cells)] = table.items()
    assert colour_of(cells["anybatch"]) == EXACT != colour_of(cells["textbook loop"])
    picture = draw(table, {}, "today")
    assert name in picture
    assert "40 rows dropped" in picture
    assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")


def test_the_page_shows_the_table_that_was_measured_and_anybatch_is_exact_in_all_of_it():
    content = json.loads((DOCS / "benchmarks" / "exactness.json").read_text())
    table = from_json(content["table"])
    versions = {package: version for package, version in content["versions"].items() if package != "python"}
    assert markdown(table, versions, content["date"]) in (DOCS / "benchmarks" / "exactness.md").read_text()
    assert list(table) == [case.name for case in CASES]
    ours = [(case, cell) for case, cells in table.items() for name, cell in cells.items() if name.endswith("anybatch")]
    assert [case for case, cell in ours if not isinstance(cell, str) and not cell.is_exact] == []
    assert all(any(name.endswith("anybatch") for name in cells) for cells in table.values())


def test_the_learning_rate_at_which_all_start_moves_the_weights():
    case = rows.uneven_tail()
    updates = watch(case, at_once.learn).updates
    assert LR > 0
    assert not torch.equal(updates[0].weights[0], updates[1].weights[0])
