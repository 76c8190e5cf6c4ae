"""`anybatch plan --model`: a model that is only a config file, and what to change so that it fits."""

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers

from anybatch import Update, measure_peak, plan
from anybatch.app.cli.main import run
from anybatch.memory import parameters_on_meta, plan_config
from anybatch.memory.ways_to_fit import last_sentence
from anybatch.objectives import huggingface

SMALL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ASKED = {"tokens": 48, "rows": 6}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def of_real_weights(*, memory, optimizer=torch.optim.AdamW, **options):
    """The plan of the same model with real weights, for the same card."""
    settings = {name: value for name, value in SMALL.items() if name != "model_type"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, use_cache=False)).bfloat16().train()
    tokens = torch.zeros(ASKED["rows"], ASKED["tokens"], dtype=torch.long)
    made = optimizer(model.parameters())
    batch = {"input_ids": tokens, "labels": tokens}
    return plan(model, made, huggingface(), batch, memory=memory, device="cuda", **options)


@pytest.fixture(scope="module")
def too_large(config):
    """The plan for a card that not even one row fits into."""
    return plan_config(config, **ASKED, memory="4MiB")


def peak_of(planned, words):
    return next(way.peak for way in planned.ways_to_fit if words in way.change)


def test_a_config_is_planned_to_the_byte_of_the_model_with_weights(too_large):
    real = of_real_weights(memory="4MiB", checkpointing=False)
    assert (too_large.least_bytes, too_large.whole_bytes) == (real.least_bytes, real.whole_bytes)
    assert too_large.breakdown == real.breakdown


def test_each_way_needs_what_a_plan_with_that_change_needs(too_large):
    def by_parameter(parameters):
        return torch.optim.AdamW(parameters, foreach=False)

    summed_low = of_real_weights(memory="4MiB", checkpointing=False, sums="param")
    stepped = of_real_weights(memory="4MiB", checkpointing=False, optimizer=by_parameter)
    # a cast that is no longer needed is still counted
    assert summed_low.least_bytes <= peak_of(too_large, 'sums="param"') <= 1.03 * summed_low.least_bytes
    assert stepped.least_bytes <= peak_of(too_large, "fused=True") <= 1.03 * stepped.least_bytes
    assert peak_of(too_large, "checkpointing the 2 LlamaDecoderLayer") == too_large.checkpointing.peak
    # the state in bf16 is two bytes for each number, of which one stays, with its scales
    state = too_large.breakdown.optimizer
    saved = too_large.least_bytes - peak_of(too_large, "8 bits")
    assert saved == pytest.approx(state * (1 / 2 - 1 / 128), rel=1e-3)


def test_the_last_sentence_names_ways_that_fit_and_no_other(too_large):
    last = too_large.describe().splitlines()[-1]
    assert last.startswith("Any of these makes one row fit: ")
    fitting = [way for way in too_large.ways_to_fit if way.fits]
    assert fitting
    assert all(way.peak <= too_large.limit for way in fitting)
    told = last.removeprefix("Any of these makes one row fit: ").split("; ")
    assert not any(said.startswith(f"{way.change} (") for said in told for way in too_large.ways_to_fit if not way.fits)
    nothing = last_sentence([replace(way, fits=False) for way in too_large.ways_to_fit], is_fitting=False)
    assert nothing.startswith("Nothing here makes one row fit: use shorter rows, or a smaller model. The least is ")


def test_auto_takes_other_sums_where_fp32_does_not_fit(config, capsys, too_large):
    low = peak_of(too_large, 'sums="param"')
    between = f"{(low + too_large.least_bytes) / 2 / 0.95 / 1024:.0f}KiB"
    asked = ["plan", "--model", str(config), "--tokens", "48", "--rows", "6", "--memory", between]
    assert run([*asked, "--sums", "auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fits"], found["sums"]) == (True, "param")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"cannot be read \(No such file"),
        ("{", "is no JSON"),
        ("[1]", "holds a list; expected an object"),
        ("{}", "has no model_type"),
        ('{"model_type": "lama"}', r"model_type 'lama', .*did you mean llama\?"),
        ('{"model_type": "vit"}', "vit has no language model in transformers. Write a task file"),
        ('{"model_type": "llama", "hidden_size": "x"}', "transformers made no model of it .*values of the config"),
    ],
)
def test_a_file_that_is_no_config_is_said_by_what_is_wrong_with_it(tmp_path, capsys, text, said):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert run(["plan", "--model", str(path), "--memory", "1GB"]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "plan needs a TASK, or --model"),
        (["digits", "--tokens", "8"], "--tokens is of a config file"),
        (["digits", "--model", "x.json"], "give no TASK"),
        (["--model", "CONFIG", "--dtype", "bf61"], "did you mean bf16"),
        (["--model", "CONFIG", "--optimizer", "adamww"], "did you mean adamw"),
        (["--model", "CONFIG", "--rows", "0"], "--rows 0: expected 1 or more"),
    ],
)
def test_options_that_do_not_go_together_are_said(config, capsys, options, said):
    assert run(["plan", *(str(config) if one == "CONFIG" else one for one in options)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_transformers_is_said_with_how_to_get_it(config, capsys, monkeypatch):
    monkeypatch.setattr("anybatch.app.cli.plan.find_spec", lambda name: None)
    assert run(["plan", "--model", str(config), "--memory", "1GB"]) == 2
    assert "needs transformers. Install it with: pip install 'anybatch[huggingface]'" in capsys.readouterr().err


def test_a_large_task_is_planned_without_its_weights(tmp_path, capsys, monkeypatch):
    task = tmp_path / "large.py"
    task.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from anybatch import Task, supervised\n"
        "def task():\n"
        "    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])\n"
        "    data = torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randint(0, 64, (32,)))\n"
        "    task.seen = {one.device.type for one in model.parameters()}\n"
        "    return Task(model=model, optimizer=torch.optim.AdamW(model.parameters()), batch_size=16, micro_batch=4,\n"
        "                objective=supervised(nn.CrossEntropyLoss()), training=data, validation=data)\n"
    )
    found = {}
    for free in (2**40, 8 * 20_000):
        monkeypatch.setattr("anybatch.core.free_on_host", lambda free=free: free)
        assert run(["plan", str(task), "--memory", "1GiB", "--device", "cuda", "--json"]) == 0
        found[free] = json.loads(capsys.readouterr().out)
    first, second = found.values()
    assert first == second
    with parameters_on_meta(beyond=20_000):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    assert [layer.weight.device.type for layer in model] == ["cpu"] + ["meta"] * 7


def test_attention_that_a_real_run_does_without_a_mask_is_planned_without_one():
    settings = {name: value for name, value in SMALL.items() if name != "model_type"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, use_cache=False)).train()
    model.gradient_checkpointing_enable()
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(8, 96, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    update = Update(model, optimizer, huggingface(), micro_batch=4, check="off")
    update(batch)
    truth = measure_peak(update, batch)[1]

    def planned(batch):
        found = plan(model, optimizer, huggingface(), batch, memory="1GiB", checkpointing=False)
        return found.peak(4) - found.outside(4)

    assert planned(batch) == pytest.approx(truth, rel=0.01)
    positions = torch.arange(96).repeat(8, 1)
    assert planned({**batch, "position_ids": positions}) > 1.03 * truth, "keys and values repeated for a mask"
