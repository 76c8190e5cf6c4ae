"""What `Update(check=...)` takes against every malloc, and against the update that it precedes.

    python -m benchmarks.check_truth [--look] [NAME...]

At 1, 3, 8, 32 rows and the whole batch: the most bytes of an update, and of the check before it, with weights, the optimizer's
state (as of a run that resumes) and the batch; and what `plan` says of the larger of the two. Signs matter: plus is a check
that takes more than its update, minus a plan below the truth. With `--look` it is the default one, `check="first"`. A process
per workload.
"""

import gc
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anybatch import Update, plan
from anybatch.batches import tensors
from anybatch.memory import bytes_of, drop_gradients, standing_tensors
from anybatch.passes import Running
from anybatch.proof import look_first, self_check
from benchmarks.every_malloc import Counted, in_own_process
from benchmarks.memory_held_out import HELD_OUT
from benchmarks.memory_workloads import BUILT_ON, CLASSES, ROWS, MemoryWorkload, mlp, tokens, vectors
from benchmarks.models import SmallTransformer

SIZES = (1, 3, 8, 32, ROWS)


def plain(model: torch.nn.Module, batch: Any, **options: Any) -> MemoryWorkload:
    return MemoryWorkload(model=model, objective=CLASSES, batch=batch, **options)


def in_bf16(optimizer: Any) -> MemoryWorkload:
    return plain(mlp().bfloat16(), (vectors()[0].bfloat16(), vectors()[1]), optimizer=optimizer)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


CHECKED: dict[str, Callable[[], MemoryWorkload]] = {
    "MLP, AdamW": lambda: plain(mlp(), vectors()),
    "MLP, SGD": lambda: plain(mlp(), vectors(), optimizer=sgd),
    "MLP, bf16, AdamW": lambda: in_bf16(torch.optim.AdamW),
    "MLP, bf16, SGD": lambda: in_bf16(sgd),
    "MLP, autocast": lambda: plain(mlp(), vectors(), options={"autocast": torch.bfloat16}),
    "GPT": lambda: plain(SmallTransformer(), tokens(64)),
    **{name: BUILT_ON[name] for name in ("ResNet, micro", "Llama, GQA", "LSTM", "coupled encoder")},
    **{name: HELD_OUT[name] for name in ("BERT, autocast", "GRU, bidirectional")},
}


def most(run: Callable[[Any], Any], update: Update, batch: Any, counted: Counted) -> tuple[int, Any]:
    """The most bytes of the second run, all that was there before included, and what it returned."""
    for _ in range(2):  # what is loaded once is there the second time
        drop_gradients(update.parameters())
        gc.collect()
        standing = bytes_of([*standing_tensors(update), *tensors(batch)])
        before = counted.live
        counted.restart()
        returned = run(batch)
    return standing + counted.peak - before, returned


def measure(name: str, *, is_look: bool) -> dict[str, Any]:
    """Of each size, bytes of the update, of the check, and what was planned for both."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    work = CHECKED[name]()
    optimizer = work.optimizer(work.model.parameters())
    running = Running(**work.options)
    parts = work.model, optimizer, work.objective
    options = {"running": running, "checkpointing": False, "ranking": False, "memory": "4GiB"}
    planned = plan(*parts, work.batch, check="first" if is_look else "full", **options)
    counted = Counted()
    look = look_first if is_look else self_check
    found = {}
    for size in SIZES:
        update = Update(*parts, micro_batch=size, running=running, check="off")
        try:
            taken, _ = most(update, update, work.batch, counted)
            looked, told = most(partial(look, update.accumulator), update, work.batch, counted)
        except ValueError:  # BatchNorm has no variance over one row
            continue
        predicted = planned.whole_bytes if size == ROWS else planned.peak(size)
        found[size] = taken, looked, predicted, told.finding
    return {"name": name, "found": found}


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    kinds = [argument for argument in sys.argv[1:] if argument == "--look"]
    if "--here" in sys.argv:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(names[0], is_look=bool(kinds))))
        return
    for name in names or CHECKED:
        ran = in_own_process("benchmarks.check_truth", "--here", *kinds, name)
        if ran.returncode:
            print(f"{name:20} failed: {ran.stderr.strip().splitlines()[-1][:160]}", flush=True)
            continue
        found = json.loads(ran.stdout.splitlines()[-1])["found"]
        for size, (update, check, predicted, finding) in found.items():
            told = "" if finding == "passed" else f"  {finding}"
            off = predicted / max(update, check) - 1
            row = f"{update / 1e6:7.2f} {check / 1e6:7.2f} MB {check / update - 1:+7.1%}   planned {off:+7.1%}{told}"
            print(f"{name:20} {size:>3} {row}", flush=True)


if __name__ == "__main__":
    main()
