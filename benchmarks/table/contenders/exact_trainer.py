"""The Trainer of transformers, made exact: the same script with one word more."""

import transformers
from torch import nn
from torch.optim import Optimizer

from anybatch.integrations.huggingface import exact
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt
from benchmarks.table.contenders.hf_trainer import train


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    return train(
        case, model, optimizer, exact(transformers.Trainer, batch_norm="exact" if case.are_rows_coupled else None)
    )
