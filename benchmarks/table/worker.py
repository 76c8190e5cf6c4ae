"""One process of one contender: train on each case, and leave what the optimizer was handed in a file per rank.

    python -m benchmarks.table.worker CONTENDER FOLDER CASE-NUMBER...

Every case starts from a copy of its model, on one thread.
"""

import copy
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from benchmarks.table.case import LR, Case
from benchmarks.table.cases import all_cases
from benchmarks.table.contenders import CONTENDERS, Learn
from benchmarks.table.witness import Run, Witness

DONE = "done with case"


def watch(case: Case, learn: Learn) -> Run:
    """Let a contender learn a case, and say what its optimizer was handed."""
    torch.manual_seed(0)
    model: nn.Module = copy.deepcopy(case.model()).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    witness = Witness(case, model, optimizer)
    learnt = learn(case, model, optimizer)
    return Run(
        updates=witness.updates,
        lr=float(optimizer.param_groups[0]["lr"]) / LR,
        scheduler_steps=None if learnt.scheduler is None else learnt.scheduler.last_epoch,
        note=learnt.note,
    )


def main() -> None:
    name, folder, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    learn = next(contender for contender in CONTENDERS if contender.name == name).load()
    cases, rank = all_cases(), os.environ.get("RANK", "0")
    for number in numbers:
        case = cases[int(number)]
        run = watch(case, learn)
        torch.save(run, Path(folder) / f"{number}.{rank}.pt")
        if torch.distributed.is_initialized() and case.ranks > 1:
            # only now: DDP holding the last reference to its group waits for a thread that waits for it (torch 2.13, gloo)
            torch.distributed.destroy_process_group()
        os.write(1, f"{DONE} {number}\n".encode())  # in one go: ranks write to the same pipe


if __name__ == "__main__":
    main()
