"""Trainers of transformers, TRL and sentence-transformers whose updates have the whole batch's gradient.

    trainer = exact(SFTTrainer)(model, args, train_dataset=...)

The batch is what they collect for one update: `per_device_train_batch_size` times `gradient_accumulation_steps` on every rank.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from anybatch.core import (
    Accumulator,
    Batch,
    BatchNorm,
    MicroBatch,
    Objective,
    Offload,
    Split,
    as_split,
    count_units,
    map_tensors,
    takes_fp32_gradients,
)
from anybatch.errors import LossError, ParallelError, SplitError, UpdateError
from anybatch.integrations.same_ranks import check_ranks
from anybatch.integrations.trainer_loader import dealt_loader, rows_of
from anybatch.integrations.trainer_units import OF_SENTENCES, PAIRED, is_a, objective_of
from anybatch.integrations.trainer_window import EachBatch, StandIn, as_pairs, from_pairs, joined
from anybatch.ragged import Tokens

SPLIT_FILE = "anybatch_split.json"
"""Beside a checkpoint's own files: what was learnt of what fits."""


class ExactTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose every update has the gradient of all rows it collected, as if they had fitted at once.

    Options are attributes of the class, or arguments of `exact`. `micro_batch` cuts what it collected further: a number of rows
    that is smaller than the per-device batch, `Tokens`, `Fit` or "auto"; None leaves the batches as the loader gives them.
    `units` is a function of a batch that returns what its mean loss divides by, where that can be neither counted on the labels
    nor seen. `batch_norm` and `offload` are those of `Accumulator`.

    All else is the Trainer's. All of a window runs in its last `training_step`, which returns the loss of the window; the calls
    before it return 0.
    """

    micro_batch: MicroBatch | None = None
    units: Any = None
    batch_norm: BatchNorm | None = None
    offload: Offload = "auto"

    _window: tuple[Any, ...] = ()
    _is_untouched = False
    """Batches were handed out, and no `training_step` of ours has seen one."""
    _accumulator: Accumulator | None = None
    _shares: "list[float] | None" = None
    _saved_split: Mapping[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; a checkpoint's split goes on as it was."""
        self._window = ()
        self._is_untouched = False
        self._accumulator = None
        self._saved_split = _split_of(resume_from_checkpoint, self.args.output_dir)
        _check_setup(self)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """The Trainer's; on several ranks no row of it is dealt twice, and none is lost."""
        return _dealt(self, super().get_train_dataloader())

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The batches of one update. Nothing is counted here: units are what the loss divides by."""
        if self._is_untouched:
            raise UpdateError(
                f"training_step of {type(self).__name__} never reached exact(), which would have run the window. Call "
                "super().training_step(model, inputs, num_items_in_batch) in yours, or leave the override out."
            )
        samples = [rows_of(batch) for batch in islice(epoch_iterator, num_batches)]
        self._is_untouched = bool(samples)
        if self.is_deepspeed_enabled:
            self._shares = _shares_of(self, samples)
        return samples, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep the batch; in the window's last call, run all of it."""
        self._is_untouched = False
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if self._shares is not None:
            return _step_by_share(self, model, inputs, self._shares.pop(0))
        self._window = (*self._window, inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        window, self._window = self._window, ()
        accumulator = self._accumulator_of(model)
        with _local_gathers(self.accelerator):
            result = accumulator.backward(self._batch_of(window), scaler=self.accelerator.scaler)
        return result.loss.to(self.args.device)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; what was learnt of what fits goes with it."""
        super().save_model(output_dir, *args, **kwargs)
        state: dict[str, Any] = getattr(self._accumulator and self._accumulator.split, "state_dict", dict)()
        if self.args.should_save and state not in ({}, {"size": None}):
            (Path(output_dir or self.args.output_dir) / SPLIT_FILE).write_text(json.dumps(state))

    def _accumulator_of(self, model: nn.Module) -> Accumulator:
        """Made for the model as it was wrapped, at the first window."""
        if self._accumulator is None or self._accumulator.model is not model:
            optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
            own = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
            self._accumulator = Accumulator(
                model,
                objective_of(self, lambda model, batch: _loss_of(self, model, batch), type(self).units),
                micro_batch=_split_for(self),
                batch_norm=self.batch_norm,
                offload=self.offload,
                parameters=lambda: [*model.parameters(), *(own - {*model.parameters()})],
                keep_fp32=takes_fp32_gradients(optimizer),
                optimizer=optimizer,
            )
            check_ranks(self._accumulator, self.args.world_size)
            _restore(self._accumulator, self._saved_split)
        return self._accumulator

    def _batch_of(self, window: Sequence[Any]) -> Batch:
        """What the window collected, to be cut; None where this rank was dealt no row of it."""
        rows = tuple(batch for batch in window if not isinstance(batch, StandIn))
        if not rows:
            return None
        if is_a(self, *PAIRED):
            rows = tuple(as_pairs(batch) for batch in rows)
        if self.micro_batch is None or isinstance(self.micro_batch, int):
            return rows
        return joined(rows, _pad_id(self))


def exact(
    trainer: type[Any] = Trainer,
    *,
    micro_batch: MicroBatch | None = None,
    units: Any = None,
    batch_norm: BatchNorm | None = None,
    offload: Offload | None = None,
) -> type[Any]:
    """A class in, a class out: `trainer`, a subclass of transformers' `Trainer`, with updates that are exact.

    What is needed lies beneath all classes of `trainer` and above transformers' own, so that their `compute_loss`,
    `training_step` and constructors stay what they are. The options are those of `ExactTrainer`.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise UpdateError(
            f"exact({trainer!r:.60}): expected a class, transformers.Trainer or one derived from it, such as "
            "exact(SFTTrainer). Make the trainer of what exact() returns: exact(SFTTrainer)(model, args, ...)."
        )
    options = {
        "micro_batch": micro_batch,
        "units": None if units is None else staticmethod(units),
        "batch_norm": batch_norm,
        "offload": offload,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if micro_batch is not None:
        as_split(micro_batch)  # what is no split is refused here, where it was given

    def get_train_dataloader(self: Any) -> Any:
        return _dealt(self, super(made, self).get_train_dataloader())  # type: ignore[arg-type]

    bases = (trainer,) if issubclass(trainer, ExactTrainer) else (trainer, ExactTrainer)
    bases = (ExactTrainer,) if trainer is Trainer else bases
    made = type(
        f"Exact{trainer.__name__}",
        bases,
        given | {"get_train_dataloader": get_train_dataloader, "__doc__": trainer.__doc__, "__module__": __name__},
    )
    return made


def _loss_of(trainer: ExactTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Their `compute_loss` of one micro-batch, on a copy of the mapping, into which it writes."""
    own = from_pairs(batch) if is_a(trainer, *PAIRED) else map_tensors(batch, lambda tensor: tensor)
    with trainer.compute_loss_context_manager():
        # num_items_in_batch would make it divide by another number, and multiply by the number of ranks
        loss: Tensor = trainer.compute_loss(model, own, num_items_in_batch=None)
    return loss


def _dealt(trainer: Any, loader: Any) -> Any:
    args = trainer.args
    return dealt_loader(
        loader,
        rank=args.process_index,
        ranks=args.world_size,
        drop_last=args.dataloader_drop_last,
        is_forced=is_a(trainer, *OF_SENTENCES),
    )


def _split_for(trainer: ExactTrainer) -> Split:
    micro_batch = trainer.micro_batch
    if micro_batch is None or isinstance(micro_batch, int):
        return EachBatch(micro_batch)
    if isinstance(micro_batch, Tokens) and is_a(trainer, *PAIRED):
        raise SplitError(
            f"micro_batch={micro_batch!r}: of preferences, whose pairs stay whole, a micro-batch is a number of pairs. Give "
            "micro_batch=2 or any other number, Fit(...) or 'auto'."
        )
    return as_split(micro_batch)


def _pad_id(trainer: Any) -> int:
    holders = (trainer.processing_class, getattr(trainer.model, "config", None))
    found = (getattr(holder, "pad_token_id", None) for holder in holders)
    return next((number for number in found if isinstance(number, int)), 0)


def _check_setup(trainer: Any) -> None:
    """Refuse, by name, ways to run that compute a part of a row's loss, or step inside backward."""
    args = trainer.args
    if args.n_gpu > 1:
        raise ParallelError(
            f"the Trainer would spread each batch over {args.n_gpu} devices by DataParallel, in one process. Start a process "
            "per device: torchrun --nproc-per-node N, or show it one device with CUDA_VISIBLE_DEVICES."
        )
    parts = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    for name, size in parts.items():
        if size > 1:
            raise ParallelError(
                f"{name} parallelism over {size} ranks cuts rows, and exact() deals whole ones. Use ranks that hold whole "
                "rows: DDP or FSDP2."
            )
    if "lomo" in str(getattr(args.optim, "value", args.optim)):
        raise UpdateError(
            f"optim={args.optim!r} steps inside backward, micro-batch by micro-batch, so that no batch is ever whole. Use "
            "another optimizer, such as optim='adamw_torch'."
        )


def _split_of(resume: str | bool | None, folder: str | None) -> Mapping[str, Any] | None:
    """The state of the split in the checkpoint that is resumed, if there is one."""
    if resume is True and folder is not None and Path(folder).is_dir():
        resume = get_last_checkpoint(folder)
    path = Path(resume) / SPLIT_FILE if isinstance(resume, str) else None
    return json.loads(path.read_text()) if path is not None and path.is_file() else None


def _restore(accumulator: Accumulator, state: Mapping[str, Any] | None) -> None:
    if state is None:
        return
    if isinstance(accumulator.split, EachBatch):
        accumulator.split = EachBatch(state["size"])
    elif hasattr(accumulator.split, "load_state_dict"):
        accumulator.split.load_state_dict(state)


@contextmanager
def _local_gathers(accelerator: Any) -> Iterator[None]:
    """Inside this block a loss that gathers metrics gets those of its own rank: ranks may run different numbers of losses."""
    for name in ("gather", "gather_for_metrics"):
        setattr(accelerator, name, lambda value, *_, **__: value)
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def _shares_of(trainer: Any, samples: list[Any]) -> list[float]:
    """What each batch counts for in its window over all ranks, times the ranks that DeepSpeed averages over."""
    objective = objective_of(trainer, lambda model, batch: _loss_of(trainer, model, batch), type(trainer).units)
    is_countable = isinstance(objective, Objective) and (objective.units_for is not None or trainer.units is not None)
    if not is_countable and not is_a(trainer, "SFTTrainer", *PAIRED):
        raise LossError(
            "under DeepSpeed each loss is multiplied by its share, which must be counted before it runs, and what this loss "
            "divides by is only seen while it runs. Give exact(Trainer, units=...), a function of the batch."
        )
    rows = [as_pairs(batch) for batch in samples] if is_a(trainer, *PAIRED) else samples
    own = count_units(objective, trainer.model, rows)
    own = [0.0 if isinstance(batch, StandIn) else units for batch, units in zip(samples, own, strict=True)]
    mine = torch.tensor(sum(own), dtype=torch.float64, device=trainer.args.device)
    total = float(trainer.accelerator.reduce(mine, reduction="sum"))
    warnings.warn(
        "DeepSpeed accumulates by itself: each loss is multiplied by the share of its batch in the window, which is exact "
        "where rows stand alone, and nothing is cut further or started again.",
        stacklevel=2,
    )
    return [units / total * trainer.accelerator.num_processes if total else 0.0 for units in own]


def _step_by_share(trainer: Any, model: nn.Module, inputs: Any, share: float) -> Tensor:
    rows = as_pairs(inputs) if is_a(trainer, *PAIRED) else inputs
    loss = _loss_of(trainer, model, map_tensors(rows, lambda tensor: tensor.to(trainer.args.device)))
    loss = (loss if share else torch.nan_to_num(loss)) * share
    trainer.accelerator.backward(loss, scale_wrt_gas=False)
    return loss.detach()
