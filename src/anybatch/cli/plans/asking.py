"""What `anybatch plan` is asked, and which plan that is."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from anybatch.cli import arguments as opt
from anybatch.errors import SettingsError
from anybatch.training import Settings

OF_CONFIG = "Of a config file"


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FILE",
        help="A config.json of transformers instead of a task; no weights are made.",
        rich_help_panel=OF_CONFIG,
    ),
]
ConfigTokens = Annotated[
    int | None, typer.Option("--tokens", metavar="N", help="Tokens of each row; 2048.", rich_help_panel=OF_CONFIG)
]
ConfigRows = Annotated[
    int | None, typer.Option("--rows", metavar="N", help="Rows of the batch; 8.", rich_help_panel=OF_CONFIG)
]
ConfigDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="Of the weights: bf16, fp16 or fp32; bf16.", rich_help_panel=OF_CONFIG
    ),
]
ConfigOptimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer", metavar="NAME", help="adamw, adam, sgd, adafactor or adagrad; adamw.", rich_help_panel=OF_CONFIG
    ),
]
ConfigCheckpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Blocks run again in backward.", rich_help_panel=OF_CONFIG)
]
SumsOption = Annotated[
    Literal["fp32", "param", "auto"],
    typer.Option(
        "--sums",
        help="What gradients of bf16 and fp16 weights are summed in; auto: their own dtype only where fp32 does not fit.",
        rich_help_panel=opt.HOW,
    ),
]


def plan(
    task: opt.TaskIfAny = None,
    memory: opt.PlanMemory = None,
    model: ConfigFile = None,
    tokens: ConfigTokens = None,
    rows: ConfigRows = None,
    dtype: ConfigDtype = None,
    optimizer: ConfigOptimizer = None,
    checkpointing: ConfigCheckpointing = False,
    sums: SumsOption = "fp32",
    batch_size: opt.BatchSize = None,
    clip_norm: opt.ClipNorm = None,
    precision: opt.PrecisionOption = "fp32",
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    out: opt.Out = None,
    is_json: opt.PlanJson = False,
    quiet: opt.Quiet = False,
) -> int:
    """Say which micro-batch fits into a memory, and what an update needs, before anything runs.

    The device need not be there: a laptop can plan for a card that it does not have. Where the batch has to be cut, the ways
    that fit (smaller micro-batches, checkpointing, saved tensors on the host) are in the order of their time, as measured on a
    model that is here. With --model: of a transformers config.json instead of a task; no weights are made.

    Example: anybatch plan stdlib --memory 64MiB

    Example: anybatch plan --model llama-8b.json --tokens 4096 --dtype bf16 --optimizer adamw --memory 80GB
    """
    asked = {"tokens": tokens, "rows": rows, "dtype": dtype, "optimizer": optimizer}
    given = {name: value for name, value in asked.items() if value is not None}
    settings = Settings(
        batch_size=batch_size, clip_norm=clip_norm, precision=precision, seed=seed, device=device, updates=1
    )
    if model is not None:
        if task is not None:
            raise SettingsError("--model is planned instead of a task, on one device; give no TASK with it.")
        from anybatch.cli.plans.run_config_plan import config_plan_command

        options = given | {"checkpointing": checkpointing, "sums": sums, "memory": memory}
        return config_plan_command(model, options, settings, out=out, is_json=is_json, is_quiet=quiet)
    if task is None:
        raise SettingsError("plan needs a TASK, or --model with the config.json of a model of transformers.")
    for name in (*given, *(["checkpointing"] if checkpointing else [])):
        raise SettingsError(f"--{name} is of a config file: give one with --model, or leave the option out.")
    from anybatch.cli.plans.run_plan import plan_command

    return plan_command(task, settings, sums=sums, memory=memory, out=out, is_json=is_json, is_quiet=quiet)
