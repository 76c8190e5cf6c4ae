"""What an update takes, as several tools say it beforehand, beside every malloc of it.

    python -m benchmarks.estimators

An update of 64 rows in micro-batches of 8, on the CPU, a process each. `accelerate estimate-memory` and the estimators of
DeepSpeed know the parameters alone: neither batch nor activations, and the optimizer is taken for Adam, by DeepSpeed with
weights in fp16. torch's MemTracker follows a real step: the same accumulation written by hand. `plan` is ours.
"""

import json
import sys
import warnings
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from anybatch import plan
from anybatch.batches import Rows, num_rows, tensors
from anybatch.passes import Running
from benchmarks.every_malloc import Counted, in_own_process
from benchmarks.memory_held_out import HELD_OUT
from benchmarks.memory_truth import truth
from benchmarks.memory_workloads import BUILT_ON, MemoryWorkload

NAMES = ("Llama, GQA", "LSTM", "ResNet, micro", "Mamba", "ViT, clip_norm", "T5, Adafactor", "Whisper", "MLP, SGD, bf16")
SIZE = 8
TOOLS = ("accelerate", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "MemTracker", "anybatch plan")


def of_parameters(model: torch.nn.Module) -> dict[str, int]:
    """What the formulas say."""
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    number, largest = model_to_params(model)
    second = estimate_zero2_model_states_mem_needs(number, num_gpus_per_node=1, num_nodes=1, cpu_offload=False)
    third = estimate_zero3_model_states_mem_needs(
        number, largest, num_gpus_per_node=1, num_nodes=1, cpu_offload=False, cpu_offload_params=False
    )
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {
        "accelerate": max(estimate_training_usage(4 * number, dtype).values()),
        "DeepSpeed ZeRO-2": int(second[1]),
        "DeepSpeed ZeRO-3": int(third[1]),
    }


def tracked(work: MemoryWorkload, optimizer: torch.optim.Optimizer) -> int:
    """The peak that MemTracker sees of the usual loop, the second step of two."""
    tracker = MemTracker()
    tracker.track_external(work.model, optimizer, *tensors(work.batch))
    parts = Rows(SIZE).cut(work.batch).micro_batches
    with tracker:
        for _ in range(2):
            optimizer.zero_grad()
            for part in parts:
                loss = work.objective.loss(work.model, part)
                (getattr(loss, "loss", loss) * (num_rows(part) / num_rows(work.batch))).backward()
                del loss
                tracker.reset_mod_stats()
            optimizer.step()
    return max(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())


def compare(name: str) -> dict[str, Any]:
    """All of them, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    work = {**BUILT_ON, **HELD_OUT}[name]()
    optimizer = work.optimizer(work.model.parameters())
    said = of_parameters(work.model)
    running = Running(**work.options)
    planned = plan(
        work.model, optimizer, work.objective, work.batch, memory="4GiB", running=running, checkpointing=False
    )
    said["anybatch plan"] = planned.peak(SIZE)
    taken = truth(work, optimizer, SIZE, Counted())
    try:
        said["MemTracker"] = tracked(work, optimizer)
    except Exception as error:
        print(f"MemTracker: {error}", file=sys.stderr)
    return {"name": name, "taken": taken, "said": said}


def main() -> None:
    if "--here" in sys.argv:
        warnings.simplefilter("ignore")
        print(json.dumps(compare(sys.argv[-1])))
        return
    print(f"| 8 of 64 rows | every malloc | {' | '.join(TOOLS)} |\n| --- | --- | {' | '.join(['---'] * len(TOOLS))} |")
    for name in sys.argv[1:] or NAMES:
        ran = in_own_process("benchmarks.estimators", "--here", name)
        if ran.returncode:
            print(f"| {name} | failed: {ran.stderr.strip().splitlines()[-1][:200]} |", flush=True)
            continue
        found = json.loads(ran.stdout.splitlines()[-1])
        said = [found["said"].get(tool) for tool in TOOLS]
        cells = ["cannot run" if one is None else f"{one / found['taken'] - 1:+.0%}" for one in said]
        print(f"| {name} | {found['taken'] / 2**20:.1f} MiB | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
