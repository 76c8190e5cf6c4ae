"""TRL's trainers, made exact: the same script with one word more."""

from torch import nn
from torch.optim import Optimizer

from anybatch.integrations.huggingface import exact
from benchmarks.table.case import Case
from benchmarks.table.contenders import Learnt
from benchmarks.table.contenders.trl_trainer import train


def learn(case: Case, model: nn.Module, optimizer: Optimizer) -> Learnt:
    return train(case, model, optimizer, exact)
