"""From a log to findings, without torch: stored lines are judged again."""

import json
from pathlib import Path

import pytest

from anybatch.doctor import as_github, as_sarif, describe, judge_folder
from anybatch.doctor.judging import judge
from anybatch.doctor.log import Log

PLACE = {"file": "/a/train.py", "line": 7, "function": "f", "via": "backward", "chain": "x"}


def _pass(serial, weight, *, count=8.0, probe=1.0, **more):
    terms = [{"role": "NllLoss", "kind": "mean", "weight": weight, "counts": [count]}]
    facts = {"event": "backward", "serial": serial, "place": PLACE, "terms": terms, "touched": "0-1", "loss": 1.0}
    return {**facts, "probe": {"0": [weight * probe, weight * (probe + serial)]}, **more}


def _step():
    return {"event": "step", "optimizer": 0, "holding": "0-1", "lr": [0.1], "place": {**PLACE, "line": 9}, "probe": {}}


CLEARED = {"event": "changed", "how": "cleared", "parameters": "0-1", "by": "zero_grad", "place": {**PLACE, "line": 10}}
OPTIMIZER = {"event": "optimizer", "optimizer": 0, "kind": "SGD", "parameters": "0-1", "lr": [0.1], "place": PLACE}


def _log(*events):
    return Log(
        "stored",
        ({"event": "start", "rank": 0, "world": 1}, OPTIMIZER, *events, {"event": "end", "reason": "finished"}),
    )


def _kinds(log, severity="error"):
    return [finding.kind for finding in judge([log]).findings if finding.severity == severity]


def _windows(weights, **more):
    events, serial = [], 0
    for window in weights:
        for weight in window:
            events.append(_pass(serial, weight, **more))
            serial += 1
        events += [_step(), CLEARED]
    return _log(*events)


@pytest.mark.parametrize(
    ("weights", "kinds"),
    [
        ([[0.25] * 4] * 3, []),
        ([[1.0] * 4] * 3, ["not-divided"]),
        ([[0.0625] * 4] * 3, ["divided-twice"]),
        ([[0.25] * 4] * 3 + [[0.25]], ["other-divisor"]),
        ([[0.25] * 4] * 3 + [[1.0]], []),
        ([[0.25]] + [[0.25] * 4] * 3, ["off-by-one"]),
    ],
)
def test_weights_that_do_not_add_up_to_one_are_named(weights, kinds):
    assert _kinds(_windows(weights)) == kinds


def test_the_error_of_a_forgotten_division_is_measured():
    (finding,) = [one for one in judge([_windows([[1.0] * 4] * 2)]).findings if one.severity == "error"]
    assert finding.evidence["error"] == pytest.approx(3.0)
    assert "add up to 4.00" in finding.message
    assert "(loss / 4).backward()" in finding.fix


def test_unequal_counts_with_equal_weights_are_a_mean_of_means_and_shares_are_not():
    uneven = _log(_pass(0, 0.5, count=2.0), _pass(1, 0.5, count=14.0), _step(), CLEARED)
    assert _kinds(uneven) == ["uneven-micro-batches"]
    assert _kinds(_log(_pass(0, 0.125, count=2.0), _pass(1, 0.875, count=14.0), _step(), CLEARED)) == []


def test_a_factor_that_may_be_meant_is_a_note():
    log = _windows([[0.15, 0.15]] * 3)
    assert (_kinds(log), _kinds(log, "note")[0]) == ([], "other-divisor")


def test_a_torn_or_foreign_log_is_read_as_far_as_it_goes(tmp_path: Path):
    lines = [json.dumps(line) for line in _windows([[1.0] * 4] * 2).events]
    (tmp_path / "0-1.doctor.jsonl").write_text(
        "\n".join([*lines[:-1], "[1, 2]", "no json", '{"event": "unheard"}', lines[4][:20]])
    )
    diagnosis = judge_folder(tmp_path)
    assert [one.kind for one in diagnosis.findings if one.severity == "error"] == ["not-divided"]
    assert diagnosis.loops[0].reason == "killed"


def test_the_same_diagnosis_as_text_json_sarif_and_annotations():
    diagnosis = judge([_windows([[1.0] * 4] * 2)])
    text, told = describe(diagnosis), diagnosis.as_json()
    assert "error    not-divided  /a/train.py:7" in text
    assert "1 error, no warnings, no notes" in text
    assert set(told["findings"][0]) == {"kind", "severity", "file", "line", "message", "evidence", "fix"}
    assert [part["weight"] for part in told["updates"][0]["micro_batches"]] == [1.0] * 4
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    (run,) = as_sarif(diagnosis, "1")["runs"]
    assert next((result["ruleId"], result["level"]) for result in run["results"]) == ("not-divided", "error")
    assert (
        as_github(diagnosis)
        .splitlines()[0]
        .startswith("::error file=/a/train.py,line=7,title=not-divided::The weights")
    )


def test_a_finding_without_a_line_is_annotated_too():
    trouble = {"event": "trouble", "error": "ValueError: no", "within": "look", "line": 3}
    diagnosis = judge([_log(_pass(0, 1.0), _step(), CLEARED, trouble)])
    assert [one.file for one in diagnosis.findings if one.kind == "recorder-trouble"] == [""]
    assert "::notice file=,line=1,title=recorder-trouble::The recorder failed" in as_github(diagnosis)
