"""`anybatch plan --model`: a model that is only a config file."""

import json

from anybatch.cli.main import run

SMALL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def planned(capsys, path, *arguments):
    code = run(["plan", "--model", str(path), "--tokens", "32", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_config_is_planned_without_weights_and_the_end_says_what_to_change(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    code, found = planned(capsys, path, "--memory", "1GB")
    assert (code, found["fits"], found["sums"]) == (0, True, "fp32")
    code, short = planned(capsys, path, "--memory", str(found["least_bytes"] // 2))
    assert (code, short["fits"], short["sums"]) == (1, False, "param")


def test_what_is_no_config_is_said(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert run(["plan", "--model", str(path)]) == 2
    assert "no config of transformers could be read" in capsys.readouterr().err
