"""The commands and their options; each imports its module when it is called."""

from typing import Annotated, Any

import typer

from anybatch import __version__
from anybatch.app.cli import arguments as opt
from anybatch.app.training.launch import check_alone
from anybatch.errors import DoctorError, SettingsError

app = typer.Typer(
    name="anybatch",
    help="Train with the batch you want, on the memory you have, and get exactly that batch's gradient.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"anybatch {__version__}")
        raise typer.Exit


@app.callback()
def anybatch(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train with the batch you want, on the memory you have, and get exactly that batch's gradient."""
    if context.invoked_subcommand not in (None, "train"):
        check_alone(context.invoked_subcommand)


@app.command()
def train(
    context: typer.Context,
    task: opt.TaskIfAny = None,
    batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None,
    memory: opt.Memory = None,
    lr: opt.LR = None,
    lr_rule: opt.Rule = None,
    base_batch: opt.BaseBatch = None,
    fixed_beta2: opt.FixedBeta2 = False,
    warmup: opt.Warmup = None,
    decay: opt.DecayOption = None,
    clip_norm: opt.ClipNorm = None,
    precision: opt.PrecisionOption = "fp32",
    epochs: opt.Epochs = None,
    updates: opt.Updates = None,
    noise: opt.Noise = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    parallel: opt.ParallelOption = "ddp",
    out: opt.Out = None,
    resume: opt.Resume = None,
    save_every: opt.SaveEvery = None,
    keep: opt.Keep = 3,
    tensorboard: opt.TensorBoardFiles = False,
    rank_timeout: opt.RankTimeout = 300.0,
    quiet: opt.Quiet = False,
) -> int:
    """Train a task: a plan, the updates, a page to look at, and a run that survives being killed.

    Ctrl-C saves and says how to go on. On many ranks: torchrun --nproc-per-node 4 -m anybatch train TASK; the batch is
    that of all ranks together, the micro-batch each rank's.

    Example: anybatch train digits --batch-size 128 --micro-batch 16
    """
    from anybatch.app.cli.train import TrainRequest, train_command

    size, limit = opt.rows_and_memory(micro_batch, memory)
    settings = opt.settings_of(context, micro_batch=size, memory=limit, keep_half_life=not fixed_beta2)
    given = frozenset("keep_half_life" if name == "fixed_beta2" else name for name in opt.given_options(context))
    request = TrainRequest(task, settings, given, out, resume, tensorboard, is_quiet=quiet, rank_timeout=rank_timeout)
    return train_command(request)


@app.command()
def compare(
    context: typer.Context,
    task: opt.TaskName,
    seeds: opt.Seeds = 3,
    batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None,
    lr: opt.LR = None,
    lr_rule: opt.Rule = None,
    clip_norm: opt.ClipNorm = None,
    epochs: opt.Epochs = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> int:
    """Train a task in four ways over several seeds, and print the differences.

    Small batches, an update each; the accumulation loop as it is usually written; the exact batch at the same learning
    rate; the exact batch with the learning-rate rule (default: linear for SGD, sqrt for Adam and its kin).

    Example: anybatch compare textbook --seeds 5
    """
    from anybatch.app.cli.compare import compare_command

    return compare_command(task, opt.settings_of(context), num_seeds=seeds, out=out, is_quiet=quiet)


@app.command()
def trace(
    context: typer.Context,
    task: opt.TaskName,
    batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None,
    lr: opt.LR = None,
    clip_norm: opt.ClipNorm = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    out: opt.Out = None,
    quiet: opt.Quiet = False,
) -> int:
    """Show one update stage by stage, and one sample layer by layer, with real shapes and numbers.

    Example: anybatch trace textbook
    """
    from anybatch.app.cli.trace import trace_command

    return trace_command(task, opt.settings_of(context, updates=2), out=out, is_quiet=quiet)


@app.command()
def plan(
    context: typer.Context,
    task: opt.TaskIfAny = None,
    memory: opt.PlanMemory = None,
    model: opt.ConfigFile = None,
    tokens: opt.ConfigTokens = None,
    rows: opt.ConfigRows = None,
    dtype: opt.ConfigDtype = None,
    optimizer: opt.ConfigOptimizer = None,
    checkpointing: opt.ConfigCheckpointing = False,
    sums: opt.SumsOption = "fp32",
    batch_size: opt.BatchSize = None,
    clip_norm: opt.ClipNorm = None,
    precision: opt.PrecisionOption = "fp32",
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    out: opt.Out = None,
    is_json: opt.PlanJson = False,
    quiet: opt.Quiet = False,
) -> int:
    """Predict the largest micro-batch that fits into memory, and the peak of an update, before anything runs.

    The device need not be present: a laptop can plan for a GPU that it does not have. If the batch has to be split, the ways
    to fit it (smaller micro-batches, checkpointing, saved tensors on the host) are listed. With --model, a transformers
    config.json is planned instead of a task; no weights are allocated.

    Example: anybatch plan stdlib --memory 64MiB

    Example: anybatch plan --model llama-8b.json --tokens 4096 --dtype bf16 --optimizer adamw --memory 80GB
    """
    from anybatch.app.cli.plan import config_plan_command, plan_command

    options = {"tokens": tokens, "rows": rows, "dtype": dtype, "optimizer": optimizer}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    settings = opt.settings_of(context, updates=1)
    if model is not None:
        if task is not None:
            raise SettingsError("--model is planned instead of a task, on one device; give no TASK with it.")
        given |= {"checkpointing": checkpointing, "sums": sums, "memory": memory}
        return config_plan_command(model, given, settings, out=out, is_json=is_json, is_quiet=quiet)
    if task is None:
        raise SettingsError("plan needs a TASK, or --model with the config.json of a model of transformers.")
    for name in (*given, *(["checkpointing"] if checkpointing else [])):
        raise SettingsError(f"--{name} is of a config file: give one with --model, or leave the option out.")
    return plan_command(task, settings, sums=sums, memory=memory, out=out, is_json=is_json, is_quiet=quiet)


@app.command()
def verify(
    context: typer.Context,
    task: opt.TaskName,
    batch_size: opt.BatchSize = None,
    micro_batch: opt.MicroBatch = None,
    memory: opt.VerifyMemory = None,
    precision: opt.PrecisionOption = "fp32",
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    out: opt.Out = None,
    is_json: opt.VerdictJson = False,
    quiet: opt.Quiet = False,
) -> int:
    """Check on the first batch of a task that accumulation gives the whole batch's gradient, or explain why not.

    Exit code 0 if it is exact, 1 if not, 3 if it could not be judged.

    Example: anybatch verify digits --micro-batch 5
    """
    from anybatch.app.cli.verify import verify_command

    settings = opt.settings_of(context)
    return verify_command(task, settings, memory=memory, out=out, is_json=is_json, is_quiet=quiet)


@app.command(context_settings={"allow_interspersed_args": False})
def doctor(
    script: opt.Words = None,
    updates: opt.UpdatesSeen = 20,
    short_epochs: opt.ShortEpochs = 13,
    log: opt.LogFolder = None,
    page: opt.DoctorPage = None,
    sarif: opt.SarifFile = None,
    fail_on: opt.FailOn = "error",
    is_json: opt.DoctorJson = False,
    github: opt.GitHub = False,
    static: opt.Static = False,
    compiling: opt.Compiling = False,
) -> int:
    """Run your own script, watch its training loop, and report what is wrong with it. Exit code 0 clean, 1 errors, 2 usage.

    Example: anybatch doctor train.py --epochs 1

    Example: anybatch doctor -- torchrun --nproc-per-node 2 train.py
    """
    from anybatch.app.cli.doctor import doctor_command

    if static:
        raise DoctorError(
            "--static is gone: hints from the source alone were half of what a run finds, and sometimes wrong. Leave it "
            "out: the doctor runs the script for 20 updates (--updates) and finds more."
        )
    if not script and log is None:
        raise typer.BadParameter("name a script, or -- and a command; or --log with the folder of an earlier run.")
    return doctor_command(
        script or [],
        updates=updates,
        short_epochs=short_epochs,
        log=log,
        page=page,
        sarif=sarif,
        fail_on=fail_on,
        is_json=is_json,
        is_github=github,
        is_compiling=compiling,
    )


@app.command()
def learn(
    page: opt.LessonName = None, out: opt.LessonFile = None, site: opt.SiteFolder = None, quiet: opt.Quiet = False
) -> int:
    """Learn gradient accumulation by doing it: nine short pages, one file, no network.

    trace, zero, rows, units, memory, rate, limits, write, recall. Without --out the page is opened in the browser.

    Example: anybatch learn units
    """
    from anybatch.app.cli.pages import learn_command

    return learn_command(page, out=out, site=site, is_quiet=quiet)


@app.command()
def report(run: opt.RunPath, quiet: opt.Quiet = False) -> int:
    """Write the page of a run again, from the files in its folder.

    Example: anybatch report runs/digits-20261115-120000
    """
    from anybatch.app.cli.folders import write_page
    from anybatch.app.cli.screen import say
    from anybatch.app.records.run_folder import RunFolder

    folder = RunFolder(run)
    folder.read_run()
    say(f"page: {write_page(folder)}", is_quiet=quiet)
    return 0


@app.command("self-test")
def self_test(
    device: opt.Device = "auto", rows: opt.SelfTestRows = None, out: opt.Out = None, quiet: opt.Quiet = False
) -> int:
    """Check this device in about two minutes: exactness, out-of-memory retries, Fit, plans and speed.

    Prints a table, and writes a page and a JSON to attach to an issue. Exit code 0 if every check passes, 1 if not.

    Example: anybatch self-test --device cuda
    """
    from anybatch.app.cli.pages import self_test_command

    return self_test_command(device, rows=rows, out=out, is_quiet=quiet)
