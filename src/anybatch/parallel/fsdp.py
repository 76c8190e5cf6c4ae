"""The parameters of `fully_shard` gathered for one batch, whose gradient is reduced once, when all of it is there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from anybatch.parallel.wrapping import fsdp_groups, fsdp_states


@contextmanager
def gathered(roots: Sequence[Any]) -> Iterator[None]:
    """The block in which whole parameters lie on every rank, for forwards that are under way at the same time.

    Forward and backward inside send nothing, so ranks may run as many as they have. Whole gradients add up, in the dtype that
    they are reduced in, until the block ends: there FSDP2 averages them over ranks and frees the parameters. After an error
    all of this is left to `reset_iter_state`.
    """
    states = [state for root in roots for state in fsdp_states(root)]
    for root in roots:
        root._get_fsdp_state()._lazy_init()  # as its first forward would
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        for state in fsdp_states(root):
            state._modules[0].unshard()
    parameters = [parameter for root in roots for group in fsdp_groups(root) for parameter in group.fsdp_params]
    dtypes = [(parameter.unsharded_param, parameter.unsharded_param.grad_dtype) for parameter in parameters]
    try:
        for parameter in parameters:
            if parameter.reduce_dtype is not None:
                parameter.unsharded_param.grad_dtype = parameter.reduce_dtype
        # The hooks of fully_shard know one forward at a time: the second to leave a unit would free it. In this state, meant
        # for forwards that are repeated inside backward, they cast inputs and outputs and touch nothing else.
        _set_state(states, "PRE_BACKWARD")
        yield
        _set_state(states, "IDLE")
        for root in roots:
            root._get_fsdp_state()._root_post_backward_final_callback()
    finally:
        _set_state(states, "IDLE")
        for unsharded, dtype in dtypes:
            unsharded.grad = None
            unsharded.grad_dtype = dtype


def _set_state(states: Sequence[Any], name: str) -> None:
    for state in states:
        state._training_state = type(state._training_state)[name]
