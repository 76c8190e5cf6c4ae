"""The options of the commands, each with its help, and the settings that they make."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from anybatch.app.training.settings import Decay, LRRule, MemoryLimit, Parallel, Precision, parse_micro_batch
from anybatch.app.training.tasks.lookup import BUILT_IN
from anybatch.display import parse_bytes
from anybatch.errors import SettingsError

TASK_HELP = "A built-in task (textbook, digits, stdlib, pairs), or a Python file with a function task()."
_how = partial(typer.Option, rich_help_panel="How it learns")
_where = partial(typer.Option, rich_help_panel="Where and how long")
_of_config = partial(typer.Option, rich_help_panel="Of a config file")


def complete_task(incomplete: str) -> list[str]:
    """For the shell: built-in tasks, folders and Python files that begin so."""
    here = [path for path in Path().glob(f"{incomplete}*") if path.suffix == ".py" or path.is_dir()]
    files = sorted(f"{path}/" if path.is_dir() else str(path) for path in here)
    return [*(name for name in BUILT_IN if name.startswith(incomplete)), *files]


TaskName = Annotated[
    str, typer.Argument(metavar="TASK", help=TASK_HELP, show_default=False, autocompletion=complete_task)
]
TaskIfAny = Annotated[
    str | None, typer.Argument(metavar="TASK", help=TASK_HELP, show_default=False, autocompletion=complete_task)
]
BatchSize = Annotated[int | None, _how("--batch-size", "-b", metavar="ROWS", help="Rows that one update learns from.")]
MicroBatch = Annotated[
    str | None,
    _how(
        "--micro-batch",
        "-m",
        metavar="ROWS|auto",
        help="Rows that are held in memory at once, such as 16; auto: the fastest that fit, found while training.",
    ),
]
Memory = Annotated[
    str | None,
    _how(
        "--memory",
        metavar="SIZE",
        help="What an update may take, such as 2GiB: micro-batches are as large as is predicted to fit.",
    ),
]
Epochs = Annotated[int | None, _where("--epochs", "-e", metavar="N", help="Passes over the data.")]
Updates = Annotated[int | None, _where("--updates", metavar="N", help="Stop after this number of updates instead.")]
LR = Annotated[float | None, _how("--lr", metavar="RATE", help="Learning rate, before the rule is applied.")]
Rule = Annotated[
    LRRule | None,
    _how(
        "--lr-rule",
        metavar="RULE",
        help="none, linear (for SGD) or sqrt (for Adam): scale the learning rate with batch / base batch.",
    ),
]
BaseBatch = Annotated[
    int | None,
    _how("--base-batch", metavar="ROWS", help="The batch that the learning rate was chosen for; the task knows."),
]
FixedBeta2 = Annotated[
    bool,
    _how(
        "--fixed-beta2",
        help="With a rule, leave Adam's beta2 alone; else its half-life in samples is kept: beta2 ** (batch / base batch).",
    ),
]
Warmup = Annotated[int | None, _how("--warmup", metavar="UPDATES", help="Updates over which the learning rate rises.")]
DecayOption = Annotated[
    Decay | None,
    _how("--decay", metavar="SHAPE", help="none, linear or cosine: how the learning rate falls after the warm-up."),
]
ClipNorm = Annotated[float | None, _how("--clip-norm", metavar="NORM", help="Clip the batch's gradient to this norm.")]
PrecisionOption = Annotated[
    Precision,
    _how("--precision", metavar="TYPE", help="fp32, bf16 or fp16: of the forward pass; fp16 scales the loss."),
]
Seed = Annotated[int, _where("--seed", metavar="N", help="Decides the weights and the order.")]
Device = Annotated[str, _where("--device", metavar="NAME", help="cpu, cuda, cuda:1, ...; auto takes a GPU if any.")]
ParallelOption = Annotated[
    Parallel,
    _where(
        "--parallel", metavar="KIND", help="ddp: each rank of torchrun holds the model; fsdp2: each holds a part of it."
    ),
]
Out = Annotated[
    Path | None, _where("--out", "-o", metavar="FOLDER", help="The run folder; runs/TASK-TIME if none is given.")
]
Quiet = Annotated[bool, _where("--quiet", "-q", help="Print nothing but errors.")]
Resume = Annotated[
    Path | None,
    _where(
        "--resume",
        metavar="RUN",
        help="Go on with the run in this folder, with its task and settings, from its last checkpoint.",
    ),
]
SaveEvery = Annotated[
    int | None,
    _where(
        "--save-every",
        metavar="UPDATES",
        help="Updates between two checkpoints; if not given, a checkpoint each epoch, and each minute of a longer one.",
    ),
]
Keep = Annotated[int, _where("--keep", metavar="N", help="How many checkpoints stay.")]
Noise = Annotated[
    int | None,
    _where(
        "--noise",
        metavar="N",
        help="Measure the noise of the gradient in one update of N; the page shows it beside the batch.",
    ),
]
TensorBoardFiles = Annotated[bool, _where("--tensorboard", help="Write TensorBoard files too.")]
RankTimeout = Annotated[
    float,
    _where(
        "--rank-timeout",
        metavar="SECONDS",
        min=1.0,
        help="How long a rank waits for another before it takes it for lost, and ends.",
    ),
]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="Runs of each arm, with seeds 0, 1, 2, ...")]
PlanMemory = Annotated[
    str | None,
    _where(
        "--memory",
        metavar="SIZE",
        help="All the memory there is, such as 6GiB; if not given, what the device has free.",
    ),
]
PlanJson = Annotated[bool, _where("--json", help="Print the plan as JSON, and nothing else.")]
VerifyMemory = Annotated[
    str | None,
    _where(
        "--memory",
        metavar="SIZE",
        help="Verify as many rows as fit into this in one go, such as 2GiB; if not given, the whole batch.",
    ),
]
VerdictJson = Annotated[bool, _where("--json", help="Print the verdict as JSON and nothing else.")]
ConfigFile = Annotated[
    Path | None,
    _of_config("--model", metavar="FILE", help="A config.json of transformers instead of a task; no weights are made."),
]
ConfigTokens = Annotated[int | None, _of_config("--tokens", metavar="N", help="Tokens of each row; 2048.")]
ConfigRows = Annotated[int | None, _of_config("--rows", metavar="N", help="Rows of the batch; 8.")]
ConfigDtype = Annotated[
    str | None, _of_config("--dtype", metavar="DTYPE", help="Of the weights: bf16, fp16 or fp32; bf16.")
]
ConfigOptimizer = Annotated[
    str | None, _of_config("--optimizer", metavar="NAME", help="adamw, adam, sgd, adafactor or adagrad; adamw.")
]
ConfigCheckpointing = Annotated[bool, _of_config("--checkpointing", help="Blocks run again in backward.")]
SumsOption = Annotated[
    Literal["fp32", "param", "auto"],
    _how(
        "--sums",
        help="What gradients of bf16 and fp16 weights are summed in; auto: their own dtype only where fp32 does not fit.",
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT|-- COMMAND", help="A Python script with its arguments, or -- and a command.", show_default=False
    ),
]
UpdatesSeen = Annotated[int, typer.Option("--updates", metavar="N", help="End the script after so many; 0: never.")]
ShortEpochs = Annotated[
    int,
    typer.Option("--short-epochs", metavar="N", help="Batches of an epoch; a prime leaves a tail for every N; 0: all."),
]
LogFolder = Annotated[
    Path | None,
    typer.Option("--log", metavar="FOLDER", help="Keep the logs here; without a script, judge those that are there."),
]
DoctorPage = Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write a page to look at.")]
SarifFile = Annotated[Path | None, typer.Option("--sarif", metavar="FILE", help="Write the findings as SARIF 2.1.0.")]
FailOn = Annotated[
    str, typer.Option("--fail-on", metavar="SEVERITY", help="Exit 1 at error, warning or note; or never.")
]
DoctorJson = Annotated[bool, typer.Option("--json", help="Print one JSON object: findings and updates.")]
GitHub = Annotated[bool, typer.Option("--github", help="Print annotations for GitHub's actions.")]
Static = Annotated[bool, typer.Option("--static", hidden=True)]
Compiling = Annotated[bool, typer.Option("--compile", help="Leave torch.compile on; it hides losses.")]


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
