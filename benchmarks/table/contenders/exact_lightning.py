"""Lightning with the exact strategy: the same module, and a loader that yields the batch."""

import os

from torch import nn
from torch.optim import Optimizer

from anybatch import GlobalBatches
from anybatch.integrations.lightning import ExactDDPStrategy, ExactStrategy
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt
from benchmarks.table.contenders.with_lightning import Module, fit_with


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    module = Module(case, model, optimizer, "step")
    # left out, units would be seen, and the first batch weighted when it is over: to a witness a wrong weight
    units = case.objective.units if case.objective.units_for is None else case.objective.units_for(model)
    strategy = (ExactDDPStrategy if case.ranks > 1 else ExactStrategy)(
        micro_batch=case.micro_batch, units=units, batch_norm="exact" if case.are_rows_coupled else None
    )
    rank = int(os.environ.get("RANK", "0"))
    batches = GlobalBatches(case.rows, case.batch, shuffle=False, rank=rank, ranks=case.ranks)
    loader = batches.loader(collate_fn=case.collate) if case.ranks > 1 else case.loader(case.batch)
    return Learnt(scheduler=fit_with(case, module, strategy, 1, loader))
