"""Accelerate: an `Update` of a prepared model and optimizer, and a loader that gives every row to one process.

model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
update = prepared_update(accelerator, model, optimizer, objective, micro_batch=16, scheduler=scheduler)
for batch in global_loader(accelerator, dataset, batch_size=64):
    update(batch)
"""

import warnings
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from anybatch.core import Coupled, MicroBatch, Objective, Ranks, Update
from anybatch.errors import BatchError, ParallelError, UpdateError
from anybatch.parallel import GlobalBatches


def prepared_update(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    objective: Objective | Coupled,
    *,
    micro_batch: MicroBatch,
    scheduler: Any = None,
    **options: Any,
) -> Update:
    """Return an `Update` of a model, optimizer and scheduler that `accelerator` prepared.

    Every call steps the optimizer, whatever Accelerate counts, and the scheduler once, not once per process. The batch is
    what all processes pass together. Warns if a prepared loader repeats rows.

    Args:
        accelerator: The `Accelerator` that prepared the other arguments; its `gradient_accumulation_steps` must be 1.
        model: The model that `accelerator.prepare` returned.
        optimizer: The optimizer that it returned.
        objective: A function of (model, batch) with its units, as for `Update`.
        micro_batch: Rows per forward and backward, or a split, as for `Update`.
        scheduler: The learning-rate scheduler, if there is one.
        **options: Further options of `Update`; `scaler` is the accelerator's unless given.

    Returns:
        The update; call it with each batch.

    Raises:
        UpdateError: If Accelerate, DeepSpeed or Megatron-LM would accumulate too.
        ParallelError: If the model was not prepared, or this version of accelerate does not list its loaders.
        BatchError: If a prepared loader leaves processes with different numbers of batches.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise UpdateError(
            f"this Accelerator runs {kind}, whose engine accumulates and steps by itself. Prepare the model for DDP or FSDP2 "
            "instead: accelerate launch --use_fsdp --fsdp_version 2, or --multi_gpu."
        )
    if accelerator.gradient_accumulation_steps > 1:
        raise UpdateError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) accumulates too. Leave it at "
            f"1, and let the loader yield batches {accelerator.gradient_accumulation_steps} times as large."
        )
    ranks = Ranks.of(model).size
    if ranks != accelerator.num_processes:
        raise ParallelError(
            f"this model is spread over {ranks} of {accelerator.num_processes} processes, so that their gradients would never "
            "meet. Give Update what accelerator.prepare(model) returned."
        )
    prepared = getattr(accelerator, "_dataloaders", None)  # there is no public name for them
    if prepared is None:
        raise ParallelError(
            "this version of accelerate does not say which loaders it prepared (Accelerator._dataloaders), so that rows dealt "
            "twice would not be seen. Use accelerate 1.15, or give the prepared model and optimizer to Update yourself."
        )
    for loader in prepared:
        _check_loader(loader, accelerator.num_processes)
    options = {"scaler": accelerator.scaler} | options
    return Update(model, optimizer, objective, micro_batch=micro_batch, scheduler=scheduler, **options)


def global_loader(
    accelerator: Any,
    dataset: Any,
    batch_size: int,
    *,
    collate_fn: Any = default_collate,
    seed: int = 0,
    shuffle: bool = True,
    **options: Any,
) -> Any:
    """Return a loader of batches of `batch_size` rows over all processes, split by `GlobalBatches`; do not `prepare` it.

    The last batch is as short as it is, and a process may have no row of it.

    Args:
        accelerator: The `Accelerator` that knows the processes.
        dataset: A dataset with a length and rows by number.
        batch_size: Rows of one update, over all processes.
        collate_fn: Function that makes a batch of a list of rows.
        seed: Seed of the order of rows.
        shuffle: Draw another order in every epoch.
        **options: Further options of `DataLoader`.

    Returns:
        A `DataLoader`.
    """
    rank, ranks = accelerator.process_index, accelerator.num_processes
    batches = GlobalBatches(dataset, batch_size, rank=rank, ranks=ranks, seed=seed, shuffle=shuffle)
    return batches.loader(collate_fn=collate_fn, **options)


def _check_loader(loader: Any, ranks: int) -> None:
    """Refuse a loader that ends earlier on some processes, and warn of one that repeats rows."""
    shards: Any = getattr(loader, "batch_sampler", None)
    if type(shards).__name__ != "BatchSamplerShard" or ranks == 1 or shards.drop_last:
        return
    dealt = shards.batch_size * ranks
    missing = -len(loader.dataset) % dealt
    if missing and not shards.even_batches and len(shards.batch_sampler) % ranks:
        raise BatchError(
            f"even_batches=False leaves {len(loader.dataset)} rows in {len(shards.batch_sampler)} batches for {ranks} "
            "processes: some would wait for ever for the others. Use anybatch.integrations.accelerate.global_loader, which "
            "deals the tail."
        )
    if missing and shards.even_batches:
        warnings.warn(
            f"a loader prepared by Accelerate deals {len(loader.dataset)} rows to {ranks} processes and repeats {missing} of "
            "them in every epoch, which count double (even_batches=True). Use "
            "anybatch.integrations.accelerate.global_loader, which deals every row once.",
            stacklevel=3,
        )
