import json

from anybatch.app.cli.main import run


def test_a_run_that_measured_noise_shows_it_on_its_page(tmp_path, task_file):
    assert run(["train", str(task_file), "--noise", "2", "--out", "out", "-q"]) == 0
    assert "Noise scale, in rows" in (tmp_path / "out" / "report.html").read_text()
    updates = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    measured = [one["noise_scale"] for one in updates if one["event"] == "update"]
    assert measured[:8] == [None] * 8
    assert None not in measured[8:]


def test_advise_is_gone_and_says_what_to_use(capsys):
    assert run(["advise", "textbook", "--ranks", "4"]) == 2
    assert "Update(noise=8)" in (said := capsys.readouterr().err)
    assert "docs/noise.md" in said


def test_a_run_folder_with_advice_of_an_earlier_version_still_opens(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"kind": "advise", "task": "digits", "status": "finished"}))
    (folder / "advice.json").write_text(json.dumps({"batch": 16, "sentences": ["Doubling 16 to 32: about half."]}))
    assert run(["report", "out", "-q"]) == 0
    assert "advice.json in this folder holds what it said" in (folder / "report.html").read_text()
