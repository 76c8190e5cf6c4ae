"""What ranks tell each other as Python values: few, small, and between updates.

A group of None is one process alone, which has nobody to ask.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Group = dist.ProcessGroup
Value = TypeVar("Value")


def rank_in(group: Group | None) -> int:
    """This process's number in the group, from 0."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: Group | None) -> int:
    """How many ranks the group has."""
    return 1 if group is None else dist.get_world_size(group)


def gather(value: Value, group: Group | None) -> list[Value]:
    """The values of all ranks, in their order, on every rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * size_of(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(make: Callable[[], Value], group: Group | None) -> Value:
    """What `make` returns on rank 0, on every rank; what it raises there is raised on all."""
    if group is None:
        return make()
    answer: list[Any] = [None, None]
    raised: Exception | None = None
    if rank_in(group) == 0:
        try:
            answer[0] = make()
        except Exception as error:
            raised = error
            answer[1] = error
    dist.broadcast_object_list(answer, group=group, group_src=0)
    if answer[1] is not None:
        raise raised or answer[1]
    value: Value = answer[0]
    return value
