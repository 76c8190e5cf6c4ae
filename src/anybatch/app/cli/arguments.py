"""The options of the commands, each with its help, and the settings that they make."""

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
    """Return how the options of one panel of the help are spelled: `--name -n`, the metavar, the help."""

    def option(names: str, metavar: str | None, text: str, **more: Any) -> Any:
        return typer.Option(*names.split(), metavar=metavar, help=text, rich_help_panel=panel, **more)

    return option


_how, _where, _of_config = map(_options, ("How it learns", "Where and how long", "Of a config file"))
_plain = _options(None)


def _complete_task(incomplete: str) -> list[str]:
    """For the shell: built-in tasks, folders and Python files that begin so."""
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
    _how(
        "--micro-batch -m",
        "ROWS|auto",
        "Rows that are held in memory at once, such as 16; auto: the fastest that fit, found while training.",
    ),
]
Memory = Annotated[
    str | None,
    _how(
        "--memory", "SIZE", "What an update may take, such as 2GiB: micro-batches are as large as is predicted to fit."
    ),
]
Epochs = Annotated[int | None, _where("--epochs -e", "N", "Passes over the data.")]
Updates = Annotated[int | None, _where("--updates", "N", "Stop after this number of updates instead.")]
LR = Annotated[float | None, _how("--lr", "RATE", "Learning rate, before the rule is applied.")]
Rule = Annotated[
    LRRule | None,
    _how(
        "--lr-rule",
        "RULE",
        "none, linear (for SGD) or sqrt (for Adam): scale the learning rate with batch / base batch.",
    ),
]
BaseBatch = Annotated[
    int | None, _how("--base-batch", "ROWS", "The batch that the learning rate was chosen for; the task knows.")
]
FixedBeta2 = Annotated[
    bool,
    _how(
        "--fixed-beta2",
        None,
        "With a rule, leave Adam's beta2 alone; else its half-life in samples is kept: beta2 ** (batch / base batch).",
    ),
]
Warmup = Annotated[int | None, _how("--warmup", "UPDATES", "Updates over which the learning rate rises.")]
DecayOption = Annotated[
    Decay | None, _how("--decay", "SHAPE", "none, linear or cosine: how the learning rate falls after the warm-up.")
]
ClipNorm = Annotated[float | None, _how("--clip-norm", "NORM", "Clip the batch's gradient to this norm.")]
PrecisionOption = Annotated[
    Precision, _how("--precision", "TYPE", "fp32, bf16 or fp16: of the forward pass; fp16 scales the loss.")
]
Seed = Annotated[int, _where("--seed", "N", "Decides the weights and the order.")]
Device = Annotated[str, _where("--device", "NAME", "cpu, cuda, cuda:1, ...; auto takes a GPU if any.")]
ParallelOption = Annotated[
    Parallel,
    _where("--parallel", "KIND", "ddp: each rank of torchrun holds the model; fsdp2: each holds a part of it."),
]
Out = Annotated[Path | None, _where("--out -o", "FOLDER", "The run folder; runs/TASK-TIME if none is given.")]
Quiet = Annotated[bool, _where("--quiet -q", None, "Print nothing but errors.")]
Resume = Annotated[
    Path | None,
    _where(
        "--resume", "RUN", "Go on with the run in this folder, with its task and settings, from its last checkpoint."
    ),
]
SaveEvery = Annotated[
    int | None,
    _where(
        "--save-every",
        "UPDATES",
        "Updates between two checkpoints; if not given, a checkpoint each epoch, and each minute of a longer one.",
    ),
]
Keep = Annotated[int, _where("--keep", "N", "How many checkpoints stay.")]
Noise = Annotated[
    int | None,
    _where("--noise", "N", "Measure the noise of the gradient in one update of N; the page shows it beside the batch."),
]
TensorBoardFiles = Annotated[bool, _where("--tensorboard", None, "Write TensorBoard files too.")]
RankTimeout = Annotated[
    float,
    _where(
        "--rank-timeout", "SECONDS", "How long a rank waits for another before it takes it for lost, and ends.", min=1.0
    ),
]
Seeds = Annotated[int, _plain("--seeds", "N", "Runs of each arm, with seeds 0, 1, 2, ...")]
PlanMemory = Annotated[
    str | None,
    _where("--memory", "SIZE", "All the memory there is, such as 6GiB; if not given, what the device has free."),
]
PlanJson = Annotated[bool, _where("--json", None, "Print the plan as JSON, and nothing else.")]
VerifyMemory = Annotated[
    str | None,
    _where(
        "--memory",
        "SIZE",
        "Verify as many rows as fit into this in one go, such as 2GiB; if not given, the whole batch.",
    ),
]
VerdictJson = Annotated[bool, _where("--json", None, "Print the verdict as JSON and nothing else.")]
ConfigFile = Annotated[
    Path | None, _of_config("--model", "FILE", "A config.json of transformers instead of a task; no weights are made.")
]
ConfigTokens = Annotated[int | None, _of_config("--tokens", "N", "Tokens of each row; 2048.")]
ConfigRows = Annotated[int | None, _of_config("--rows", "N", "Rows of the batch; 8.")]
ConfigDtype = Annotated[str | None, _of_config("--dtype", "DTYPE", "Of the weights: bf16, fp16 or fp32; bf16.")]
ConfigOptimizer = Annotated[
    str | None, _of_config("--optimizer", "NAME", "adamw, adam, sgd, adafactor or adagrad; adamw.")
]
ConfigCheckpointing = Annotated[bool, _of_config("--checkpointing", None, "Blocks run again in backward.")]
SumsOption = Annotated[
    Literal["fp32", "param", "auto"],
    _how(
        "--sums",
        None,
        "What gradients of bf16 and fp16 weights are summed in; auto: their own dtype only where fp32 does not fit.",
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT|-- COMMAND", help="A Python script with its arguments, or -- and a command.", show_default=False
    ),
]
UpdatesSeen = Annotated[int, _plain("--updates", "N", "End the script after so many; 0: never.")]
ShortEpochs = Annotated[
    int, _plain("--short-epochs", "N", "Batches of an epoch; a prime leaves a tail for every N; 0: all.")
]
LogFolder = Annotated[
    Path | None, _plain("--log", "FOLDER", "Keep the logs here; without a script, judge those that are there.")
]
DoctorPage = Annotated[Path | None, _plain("--page", "FILE", "Write a page to look at.")]
SarifFile = Annotated[Path | None, _plain("--sarif", "FILE", "Write the findings as SARIF 2.1.0.")]
FailOn = Annotated[str, _plain("--fail-on", "SEVERITY", "Exit 1 at error, warning or note; or never.")]
DoctorJson = Annotated[bool, _plain("--json", None, "Print one JSON object: findings and updates.")]
GitHub = Annotated[bool, _plain("--github", None, "Print annotations for GitHub's actions.")]
Static = Annotated[bool, _plain("--static", None, "", hidden=True)]
Compiling = Annotated[bool, _plain("--compile", None, "Leave torch.compile on; it hides losses.")]
LessonName = Annotated[
    str | None, typer.Argument(metavar="PAGE", help="One lesson; all nine if none is given.", show_default=False)
]
LessonFile = Annotated[Path | None, _plain("--out -o", "FILE", "Write the page there.")]
SiteFolder = Annotated[Path | None, _plain("--site", "FOLDER", "Write a static site for a server instead.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
SelfTestRows = Annotated[int | None, _plain("--rows", "N", "Rows of the batches that memory is filled with.", min=64)]


def settings_of(context: typer.Context, **changed: Any) -> Settings:
    """The settings among the options of a command; `changed` has those that are spelled another way there."""
    if "micro_batch" in context.params and "micro_batch" not in changed:
        changed["micro_batch"] = rows_of(context.params["micro_batch"])
    names = {field.name for field in fields(Settings)} - {"memory"}
    return Settings(**{name: value for name, value in context.params.items() if name in names} | changed)


def rows_of(micro_batch: str | None) -> int | Literal["auto"] | None:
    """What `--micro-batch` asks for, where it must be rows."""
    if micro_batch is None:
        return None
    parsed = parse_micro_batch(micro_batch)
    if not isinstance(parsed, MemoryLimit):
        return parsed
    raise SettingsError(
        f"--micro-batch {micro_batch} ({parsed.bytes:,} bytes): rows are chosen by memory in anybatch train only. Give a "
        "number of rows, such as --micro-batch 16."
    )


def size_and_room(micro_batch: str | None, memory: str | None) -> tuple[int | Literal["auto"] | None, int | None]:
    """What `--micro-batch` and `--memory` ask for: the most rows, and the bytes of an update."""
    parsed = None if micro_batch is None else parse_micro_batch(micro_batch)
    room = None if memory is None else parse_bytes(memory)
    if not isinstance(parsed, MemoryLimit):
        return parsed, room
    if room is not None:
        raise SettingsError(
            f"--micro-batch {micro_batch} and --memory {memory} both say what may be taken; give one of them."
        )
    return None, parsed.bytes


def given_options(context: typer.Context) -> set[str]:
    """The names of the parameters that the command line itself spelled out."""
    names = set()
    for name in context.params:
        source: Any = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            names.add(name)
    return names
