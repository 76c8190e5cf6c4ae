"""Options of the commands, each with its help, and the settings that they give."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from anybatch.app.training.settings import Decay, LRRule, MemoryLimit, Parallel, Precision, Settings, parse_micro_batch
from anybatch.app.training.tasks.lookup import BUILT_IN
from anybatch.display import parse_bytes
from anybatch.errors import SettingsError


def _options(panel: str | None) -> Callable[..., Any]:
    """Return a function `(names, metavar, help)` that makes the options of one panel of the help."""

    def option(names: str, metavar: str | None, text: str, **more: Any) -> Any:
        return typer.Option(*names.split(), metavar=metavar, help=text, rich_help_panel=panel, **more)

    return option


_how, _where, _config = map(_options, ("How it learns", "Where and how long", "Config file"))
_plain = _options(None)


def _complete_task(incomplete: str) -> list[str]:
    """Complete a built-in task, a folder or a Python file for the shell."""
    here = [path for path in Path().glob(f"{incomplete}*") if path.suffix == ".py" or path.is_dir()]
    files = sorted(f"{path}/" if path.is_dir() else str(path) for path in here)
    return [*(name for name in BUILT_IN if name.startswith(incomplete)), *files]


_task: Any = typer.Argument(
    metavar="TASK",
    help="A built-in task (textbook, digits, stdlib, pairs), or a Python file with a function task().",
    show_default=False,
    autocompletion=_complete_task,
)
TaskName = Annotated[str, _task]
TaskIfAny = Annotated[str | None, _task]
BatchSize = Annotated[int | None, _how("--batch-size -b", "ROWS", "Rows that one update learns from.")]
MicroBatch = Annotated[
    str | None,
    _how("--micro-batch -m", "ROWS|auto", "Rows held in memory at once; auto: the fastest size, found in training."),
]
Memory = Annotated[
    str | None,
    _how("--memory", "SIZE", "Memory of one update, such as 2GiB; micro-batches are the largest predicted to fit."),
]
Epochs = Annotated[int | None, _where("--epochs -e", "N", "Passes over the data.")]
Updates = Annotated[int | None, _where("--updates", "N", "Stop after this number of updates instead.")]
LR = Annotated[float | None, _how("--lr", "RATE", "Learning rate, before the rule is applied.")]
Rule = Annotated[
    LRRule | None,
    _how("--lr-rule", "RULE", "none, linear (SGD) or sqrt (Adam): scale the learning rate with batch / base batch."),
]
BaseBatch = Annotated[
    int | None, _how("--base-batch", "ROWS", "Batch size that the learning rate was chosen for; default: the task's.")
]
FixedBeta2 = Annotated[
    bool,
    _how("--fixed-beta2", None, "With a rule, keep Adam's beta2 instead of beta2 ** (batch / base batch)."),
]
Warmup = Annotated[int | None, _how("--warmup", "UPDATES", "Updates over which the learning rate rises.")]
DecayOption = Annotated[
    Decay | None, _how("--decay", "SHAPE", "none, linear or cosine: learning-rate decay after the warm-up.")
]
ClipNorm = Annotated[float | None, _how("--clip-norm", "NORM", "Clip the batch's gradient to this norm.")]
PrecisionOption = Annotated[
    Precision, _how("--precision", "TYPE", "fp32, bf16 or fp16 in the forward pass; fp16 scales the loss.")
]
Seed = Annotated[int, _where("--seed", "N", "Seed of the weights and of the order of rows.")]
Device = Annotated[str, _where("--device", "NAME", "cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")]
ParallelOption = Annotated[
    Parallel,
    _where("--parallel", "KIND", "ddp: each rank of torchrun holds the model; fsdp2: each holds a part of it."),
]
Out = Annotated[Path | None, _where("--out -o", "FOLDER", "The run folder; default: runs/TASK-TIME.")]
Quiet = Annotated[bool, _where("--quiet -q", None, "Print nothing but errors.")]
Resume = Annotated[
    Path | None,
    _where("--resume", "RUN", "Continue the run in this folder from its last checkpoint, with its task and settings."),
]
SaveEvery = Annotated[
    int | None,
    _where("--save-every", "UPDATES", "Updates between checkpoints; default: each epoch and each minute."),
]
Keep = Annotated[int, _where("--keep", "N", "Number of checkpoints kept.")]
Noise = Annotated[
    int | None,
    _where("--noise", "N", "Measure the gradient noise scale in one update of N, for a chart on the page."),
]
TensorBoardFiles = Annotated[bool, _where("--tensorboard", None, "Write TensorBoard files too.")]
RankTimeout = Annotated[
    float,
    _where("--rank-timeout", "SECONDS", "Time that a rank waits for the others before it ends.", min=1.0),
]
Seeds = Annotated[int, _plain("--seeds", "N", "Runs of each arm, with seeds 0, 1, 2, ...")]
PlanMemory = Annotated[
    str | None,
    _where("--memory", "SIZE", "Memory of the device, such as 6GiB; default: what is free on it."),
]
PlanJson = Annotated[bool, _where("--json", None, "Print the plan as JSON, and nothing else.")]
VerifyMemory = Annotated[
    str | None,
    _where("--memory", "SIZE", "Verify as many rows as fit into this at once, such as 2GiB; default: all."),
]
VerdictJson = Annotated[bool, _where("--json", None, "Print the verdict as JSON and nothing else.")]
ConfigFile = Annotated[
    Path | None, _config("--model", "FILE", "A transformers config.json instead of a task; no weights are allocated.")
]
ConfigTokens = Annotated[int | None, _config("--tokens", "N", "Tokens of each row; default: 2048.")]
ConfigRows = Annotated[int | None, _config("--rows", "N", "Rows of the batch; default: 8.")]
ConfigDtype = Annotated[
    str | None, _config("--dtype", "DTYPE", "Dtype of the weights: bf16, fp16 or fp32; default: bf16.")
]
ConfigOptimizer = Annotated[
    str | None, _config("--optimizer", "NAME", "adamw, adam, sgd, adafactor or adagrad; default: adamw.")
]
ConfigCheckpointing = Annotated[bool, _config("--checkpointing", None, "Recompute blocks in backward.")]
SumsOption = Annotated[
    Literal["fp32", "param", "auto"],
    _how(
        "--sums", None, "Dtype that sums gradients of bf16 and fp16 weights; auto: their own only if fp32 is too large."
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT|-- COMMAND", help="A Python script with its arguments, or -- and a command.", show_default=False
    ),
]
UpdatesSeen = Annotated[int, _plain("--updates", "N", "End the script after N updates; 0: never.")]
ShortEpochs = Annotated[int, _plain("--short-epochs", "N", "Batches per epoch; a prime number leaves a tail; 0: all.")]
LogFolder = Annotated[
    Path | None, _plain("--log", "FOLDER", "Keep the logs here; without a script, judge the logs in it.")
]
DoctorPage = Annotated[Path | None, _plain("--page", "FILE", "Write an HTML page.")]
SarifFile = Annotated[Path | None, _plain("--sarif", "FILE", "Write the findings as SARIF 2.1.0.")]
FailOn = Annotated[
    str, _plain("--fail-on", "SEVERITY", "Exit with 1 for findings of error, warning or note; or never.")
]
DoctorJson = Annotated[bool, _plain("--json", None, "Print one JSON object: findings and updates.")]
GitHub = Annotated[bool, _plain("--github", None, "Print annotations for GitHub's actions.")]
Static = Annotated[bool, _plain("--static", None, "", hidden=True)]
Compiling = Annotated[bool, _plain("--compile", None, "Leave torch.compile on, which hides losses.")]
LessonName = Annotated[
    str | None, typer.Argument(metavar="PAGE", help="One lesson; default: all nine.", show_default=False)
]
LessonFile = Annotated[Path | None, _plain("--out -o", "FILE", "Write the page to this file.")]
SiteFolder = Annotated[Path | None, _plain("--site", "FOLDER", "Write a static site instead.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
SelfTestRows = Annotated[int | None, _plain("--rows", "N", "Rows of the batches that fill the memory.", min=64)]


def settings_of(context: typer.Context, **changed: Any) -> Settings:
    """Return the settings among a command's options; `changed` overrides them."""
    if "micro_batch" in context.params and "micro_batch" not in changed:
        changed["micro_batch"] = _rows(context.params["micro_batch"])
    names = {field.name for field in fields(Settings)} - {"memory"}
    return Settings(**{name: value for name, value in context.params.items() if name in names} | changed)


def _rows(micro_batch: str | None) -> int | Literal["auto"] | None:
    rows, limit = rows_and_memory(micro_batch, None)
    if limit is None:
        return rows
    raise SettingsError(
        f"--micro-batch {micro_batch} ({limit:,} bytes): rows are chosen by memory in anybatch train only. Give a "
        "number of rows, such as --micro-batch 16."
    )


def rows_and_memory(micro_batch: str | None, memory: str | None) -> tuple[int | Literal["auto"] | None, int | None]:
    """Return the most rows and the bytes of an update that `--micro-batch` and `--memory` ask for."""
    parsed = None if micro_batch is None else parse_micro_batch(micro_batch)
    limit = None if memory is None else parse_bytes(memory)
    if not isinstance(parsed, MemoryLimit):
        return parsed, limit
    if limit is not None:
        raise SettingsError(
            f"--micro-batch {micro_batch} and --memory {memory} both say what may be taken; give one of them."
        )
    return None, parsed.bytes


def given_options(context: typer.Context) -> set[str]:
    """Return the names of the options that were typed, not defaulted."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
