"""Zeros for sharded parameters that only rows without units use."""

from dataclasses import replace

import torch
from torch import nn

from anybatch.core import Batch, BatchPlan, Tools, is_sharded, leaves_of, loss_and_metrics, move
from anybatch.parallel.torch_private_fsdp import whole_parameters

HOST = torch.device("cpu")


def give_zeros(plan: BatchPlan, tools: Tools) -> None:
    """Zeros, as the whole batch would leave them, for sharded parameters that have no gradient and are in a graph left out.

    A forward gathers the units that it runs through, on all ranks at once, and the rows of one rank may run through a unit that
    no rows of another do. So every rank runs every micro-batch that was left out on any.
    """
    bare = [p for p in tools.gradients.parameters if is_sharded(p) and p.grad is None]
    if not plan.num_left_out or not bare:  # so it is on all ranks
        return
    for lender, (count,) in enumerate(tools.ranks.gather([len(plan.left_out)])):
        for number in range(int(count)):
            lent = tools.ranks.lend(lambda: move(plan.cut[plan.left_out[number]], HOST), lender)  # noqa: B023
            used = _used(lent, tools)
            for parameter in bare:
                if parameter in used:
                    parameter.grad = torch.zeros_like(parameter)
    held = [parameter.grad for parameter in tools.gradients.parameters]
    tools.sync.forget()  # what a forward leaves for the backward that does not come; since torch 2.15, gradients too
    for parameter, gradient in zip(tools.gradients.parameters, held, strict=True):
        parameter.grad = gradient


def _used(lent: Batch, tools: Tools) -> set[nn.Parameter]:
    """The sharded parameters in the graph of the loss of this micro-batch."""
    forward = replace(tools.quiet_forward(), hooks=tuple(hook.for_lent(lent) for hook in tools.hooks))
    for hook in tools.hooks:
        hook.before_pass()
    with tools.sync.looking():
        loss, _ = loss_and_metrics(forward(lent))
    for hook in tools.hooks:
        hook.discard_pass()
    leaves = {id(leaf) for leaf in leaves_of([loss])}
    return {part for part, whole in whole_parameters(tools.forward.model) if id(whole) in leaves}
