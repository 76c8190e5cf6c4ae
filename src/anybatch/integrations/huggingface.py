"""Hugging Face: trainers of transformers, TRL and sentence-transformers with the gradient of the whole batch.

    trainer = exact(SFTTrainer)(model, args, train_dataset=...)

The batch of one update, called the window, is `per_device_train_batch_size` times `gradient_accumulation_steps` rows per rank.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import get_last_checkpoint

from anybatch.core import (
    Accumulator,
    Batch,
    BatchNorm,
    Coupled,
    Cut,
    Dealt,
    MicroBatch,
    MicroBatches,
    Number,
    Objective,
    Offload,
    Rows,
    SeenLoss,
    Split,
    as_split,
    count_units,
    join_rows,
    map_tensors,
    num_rows,
    takes_fp32_gradients,
    tensors,
)
from anybatch.errors import BatchError, LossError, ParallelError, SplitError, UnitsError, UpdateError
from anybatch.objectives import WatchedLoss, huggingface, label_units, learned, sentence_transformers
from anybatch.parallel import GlobalBatches, check_ranks, warn_of_repeated_rows
from anybatch.ragged import Tokens

SPLIT_FILE = "anybatch_split.json"
"""File with the state of the split, in the folder of a checkpoint."""


class ExactTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` with the gradient of all rows of an update, as if these had fitted into memory at once.

    Takes the arguments of `Trainer`. The options below are attributes of the class, or arguments of `exact`. The whole window
    runs in its last `training_step`, which returns the window's loss; the calls before it return 0.

    Attributes:
        micro_batch: Splits the window further: rows (fewer than the per-device batch), `Tokens`, `Fit` or "auto"; None
            runs the loader's batches as they are.
        units: Function of a batch that returns what its mean loss divides by; None if the labels or torch's loss
            functions show it.
        batch_norm: Treatment of BatchNorm, as for `Accumulator`.
        offload: Where saved tensors go, as for `Accumulator`.
    """

    micro_batch: MicroBatch | None = None
    units: Any = None
    batch_norm: BatchNorm | None = None
    offload: Offload = "auto"

    _window: tuple[Any, ...] = ()
    _is_untouched = False  # batches were handed out, and our training_step has seen none
    _accumulator: Accumulator | None = None
    _shares: list[float] | None = None  # of the window's batches, under DeepSpeed
    _saved_split: Mapping[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train`, and restore the split of a checkpoint that is resumed.

        Args:
            resume_from_checkpoint: A checkpoint, or True for the last one.
            *args: Further arguments of `Trainer.train`, as are `**kwargs`; it returns what `Trainer.train` returns.

        Raises:
            ParallelError: For DataParallel, and for tensor, context and sequence parallelism.
            UpdateError: For an optimizer that steps inside backward, and a `training_step` that skips ours.
            LossError: For a trainer with a loss that cannot be split.
            UnitsError: If what the loss divides by is unknown.
        """
        self._window = ()
        self._is_untouched = False
        self._accumulator = None
        self._saved_split = _split_of(resume_from_checkpoint, self.args.output_dir)
        _check_setup(self)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader; on several ranks every row goes to exactly one."""
        return _dealt(self, super().get_train_dataloader())

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the batches of one update, without a count of tokens: the loss has its own units."""
        if self._is_untouched:
            raise UpdateError(
                f"training_step of {type(self).__name__} never reached exact(), which would have run the window. Call "
                "super().training_step(model, inputs, num_items_in_batch) in yours, or leave the override out."
            )
        samples = [_rows_of(batch) for batch in islice(epoch_iterator, num_batches)]
        self._is_untouched = bool(samples)
        if self.is_deepspeed_enabled:
            self._shares = _shares_of(self, samples)
        return samples, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Collect the batch; in the last call of the window, run all of it."""
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
        """Save the model, and the state of the split: the size that fits."""
        super().save_model(output_dir, *args, **kwargs)
        state: dict[str, Any] = getattr(self._accumulator and self._accumulator.split, "state_dict", dict)()
        if self.args.should_save and state not in ({}, {"size": None}):
            (Path(output_dir or self.args.output_dir) / SPLIT_FILE).write_text(json.dumps(state))

    def _accumulator_of(self, model: nn.Module) -> Accumulator:
        if self._accumulator is None or self._accumulator.model is not model:
            optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
            own = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
            self._accumulator = Accumulator(
                model,
                _objective_of(self),
                micro_batch=_split_for(self),
                batch_norm=self.batch_norm,
                offload=self.offload,
                parameters=lambda: [*model.parameters(), *(own - {*model.parameters()})],
                keep_fp32=takes_fp32_gradients(optimizer),
                optimizer=optimizer,
            )
            check_ranks(model, self._accumulator.parallelism.ranks, self.args.world_size)
            if self._saved_split is not None and hasattr(self._accumulator.split, "load_state_dict"):
                self._accumulator.split.load_state_dict(self._saved_split)
        return self._accumulator

    def _batch_of(self, window: Sequence[Any]) -> Batch:
        """Return the window as one batch; None if this rank has no row of it."""
        rows = _paired(self, [batch for batch in window if not isinstance(batch, StandIn)])
        if not rows:
            return None
        is_tuple = self.micro_batch is None or isinstance(self.micro_batch, int)
        return tuple(rows) if is_tuple else _joined(rows, _pad_id(self))


def exact(
    trainer: type[Any] = Trainer,
    *,
    micro_batch: MicroBatch | None = None,
    units: Any = None,
    batch_norm: BatchNorm | None = None,
    offload: Offload | None = None,
) -> type[Any]:
    """Return a subclass of `trainer` with exact updates.

    `ExactTrainer` comes between `trainer` and transformers' `Trainer` in the method resolution order, so that the
    `compute_loss`, `training_step` and constructor of `trainer` stay in effect.

    Args:
        trainer: transformers' `Trainer` or a subclass of it, such as `SFTTrainer`.
        micro_batch: Splits the window further, as described in `ExactTrainer`.
        units: Function of a batch that returns what its mean loss divides by.
        batch_norm: Treatment of BatchNorm, as for `Accumulator`.
        offload: Where saved tensors go, as for `Accumulator`.

    Returns:
        The class; make the trainer of it: `exact(SFTTrainer)(model, args, ...)`.

    Raises:
        UpdateError: If `trainer` is not such a class.
        SplitError: If `micro_batch` is not a split.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise UpdateError(
            f"exact({trainer!r:.60}): expected a class, transformers.Trainer or one derived from it, such as "
            "exact(SFTTrainer). Make the trainer of what exact() returns: exact(SFTTrainer)(model, args, ...)."
        )
    options = {"micro_batch": micro_batch, "batch_norm": batch_norm, "offload": offload}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if units is not None:
        given["units"] = staticmethod(units)
    if micro_batch is not None:
        as_split(micro_batch)  # refuse a bad split here, where it was given

    def get_train_dataloader(self: Any) -> Any:
        return _dealt(self, super(made, self).get_train_dataloader())  # type: ignore[arg-type]

    given |= {"get_train_dataloader": get_train_dataloader, "__doc__": trainer.__doc__, "__module__": __name__}
    bases = (trainer,) if issubclass(trainer, ExactTrainer) else (trainer, ExactTrainer)
    made = type(f"Exact{trainer.__name__}", (ExactTrainer,) if trainer is Trainer else bases, given)
    return made


def _loss_of(trainer: ExactTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Call the trainer's `compute_loss` on a shallow copy of the micro-batch, because it writes into its argument."""
    own = _from_pairs(batch) if is_a(trainer, *PAIRED) else map_tensors(batch, lambda tensor: tensor)
    with trainer.compute_loss_context_manager():
        # with num_items_in_batch it would divide by another number and multiply by the number of ranks
        loss: Tensor = trainer.compute_loss(model, own, num_items_in_batch=None)
    return loss


def _split_for(trainer: ExactTrainer) -> Split:
    micro_batch = trainer.micro_batch
    if micro_batch is None or isinstance(micro_batch, int):
        return EachBatch((trainer._saved_split or {"size": micro_batch})["size"])
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
    """Refuse ways to run that compute a part of a row's loss, or step inside backward."""
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
    """Return the state of the split in the checkpoint to resume; None if there is none."""
    if resume is True and folder is not None and Path(folder).is_dir():
        resume = get_last_checkpoint(folder)
    path = Path(resume) / SPLIT_FILE if isinstance(resume, str) else None
    return json.loads(path.read_text()) if path is not None and path.is_file() else None


@contextmanager
def _local_gathers(accelerator: Any) -> Iterator[None]:
    """Make `gather` return its own rank's values in a loss: ranks may run different numbers of losses."""
    for name in ("gather", "gather_for_metrics"):
        setattr(accelerator, name, lambda value, *_, **__: value)
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


def _shares_of(trainer: Any, samples: list[Any]) -> list[float]:
    """Return each batch's share of the window's units over all ranks, times the ranks that DeepSpeed averages over."""
    objective = _objective_of(trainer)
    is_countable = isinstance(objective, Objective) and (objective.units_for is not None or trainer.units is not None)
    if not is_countable and not is_a(trainer, "SFTTrainer", *PAIRED):
        raise LossError(
            "under DeepSpeed each loss is multiplied by its share, which must be counted before it runs, and what this loss "
            "divides by is only seen while it runs. Give exact(Trainer, units=...), a function of the batch."
        )
    own = count_units(objective, trainer.model, _paired(trainer, samples))
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
    (rows,) = _paired(trainer, [inputs])
    loss = _loss_of(trainer, model, map_tensors(rows, lambda tensor: tensor.to(trainer.args.device)))
    loss = (loss if share else torch.nan_to_num(loss)) * share
    trainer.accelerator.backward(loss, scale_wrt_gas=False)
    return loss.detach()


# The loader: every row goes to one rank, in the order of the sampler.

KNOWN_TO_ALL = ("SeedableRandomSampler", "SequentialSampler")
"""Samplers that give every rank the same order."""
MIXED = ("ProportionalBatchSampler", "RoundRobinBatchSampler")
"""Samplers of sentence-transformers that take each batch from another dataset."""
LOADER_OPTIONS = ("num_workers", "pin_memory", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


class EpochLoader(DataLoader[Any]):
    """Loader with `set_epoch`, which passes the epoch on to its batch sampler."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _dealt(trainer: Any, loader: Any) -> Any:
    """Replace Accelerate's sharding of a loader by `GlobalBatches`: full batches go to the same ranks as before.

    The last batch, which Accelerate fills up with earlier rows, is split between the ranks. A stream, and a loader that drops
    its tail, stay as they are; sentence-transformers drops the tail on several ranks only, and here keeps it.
    """
    args = trainer.args
    rank, ranks = args.process_index, args.world_size
    shards = getattr(loader, "batch_sampler", None)
    batches: Any = getattr(shards, "batch_sampler", None)
    is_dropped = args.dataloader_drop_last and not is_a(trainer, *OF_SENTENCES)
    if isinstance(loader, EpochLoader) or ranks == 1 or is_dropped or type(shards).__name__ != "BatchSamplerShard":
        warn_of_repeated_rows(loader, rank=rank, ranks=ranks)
        return loader
    if args.dataloader_drop_last:
        batches.drop_last = False
    if type(batches).__name__ in MIXED:
        raise ParallelError(
            f"this loader takes batches from several datasets in turn ({type(batches).__name__}), which exact() cannot deal to "
            f"{ranks} ranks row by row. Train on one dataset, or on one rank."
        )
    size = getattr(batches, "batch_size", None)
    size = size if isinstance(size, int) else max(len(batch) for batch in batches)
    dealt = GlobalBatches(loader.dataset, size * ranks, rank=rank, ranks=ranks, order=_order_of(batches))
    options = {name: getattr(loader, name) for name in (*LOADER_OPTIONS, "persistent_workers")}
    return dealt.loader(collate_fn=loader.collate_fn, loader=EpochLoader, **options)


def _rows_of(batch: Any) -> Any:
    if not isinstance(batch, Dealt):
        return batch
    return StandIn(batch.batch) if batch.is_stand_in else batch.batch


def _order_of(batches: Any) -> Callable[[int], list[int]]:
    """Return a function from an epoch to the order of its rows; rank 0 draws it if the sampler's seed is not shared."""

    @lru_cache(maxsize=1)
    def order(epoch: int) -> list[int]:
        sampler: Any = getattr(batches, "sampler", None)
        for one in (batches, sampler):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        if type(sampler).__name__ in KNOWN_TO_ALL:
            return list(chain.from_iterable(batches))
        drawn = [list(chain.from_iterable(batches)) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(drawn, src=0)
        return drawn[0] or []

    return order


# Units: the number that the loss of a Trainer divides by.

REFUSED = {
    "GRPOTrainer": "it makes its batches itself while it trains, from answers that it generates for several windows ahead",
    "RLOOTrainer": "it makes its batches itself while it trains, from answers that it generates for several windows ahead",
    "KTOTrainer": "its loss compares each answer with a mean over the batch at hand, which differs from cut to cut",
}
COUPLED_PREFERENCES = {
    "aot": "sorts the pairs of a batch against each other",
    "aot_unpaired": "sorts the pairs of a batch against each other",
    "sft": "is a mean over tokens, beside means over pairs",
}
"""Losses of DPO that are not a mean over pairs."""
PAIRED = ("DPOTrainer", "RewardTrainer")
OF_SENTENCES = ("SentenceTransformerTrainer", "SparseEncoderTrainer")
LossFunction = Callable[[nn.Module, Batch], Tensor]


def is_a(trainer: Any, *names: str) -> bool:
    """Return True if a class of the trainer has one of these names."""
    return any(base.__name__ in names for base in type(trainer).__mro__)


def _objective_of(trainer: Any) -> Objective | Coupled:
    """Return the trainer's loss with its units: known by class, counted on the labels, or observed as the loss runs."""

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        return _loss_of(trainer, model, batch)

    units = type(trainer).units
    for base in type(trainer).__mro__:
        if base.__name__ in REFUSED:
            raise LossError(
                f"exact({base.__name__}) is not built: {REFUSED[base.__name__]}. Use {base.__name__} as it is."
            )
    if is_a(trainer, *OF_SENTENCES):
        return _of_sentences(trainer)
    if units is not None:
        return Objective(compute, units)
    if is_a(trainer, *PAIRED):
        _check_preferences(trainer)
        return Objective(compute, num_rows)
    if trainer.compute_loss_func is not None:
        return Objective(FunctionLoss(trainer, compute), lambda batch: 1)  # type: ignore[arg-type]
    return _by_owner(trainer, compute)


def _by_owner(trainer: Any, compute: LossFunction) -> Objective:
    """Decide by the class that defines `compute_loss`: TRL's, transformers', or unknown, which is observed."""
    owner = next(base for base in type(trainer).__mro__ if "compute_loss" in vars(base))
    if owner.__module__.startswith("trl."):
        return _of_trl(trainer, owner, compute)
    if not owner.__module__.startswith("transformers."):
        name = type(getattr(trainer, "loss", None)).__name__
        if is_a(trainer, "CrossEncoderTrainer") and "NegativesRanking" in name:
            raise LossError(
                f"exact(CrossEncoderTrainer) with {name} is not built: it scores each query with answers of other rows of its "
                "batch, so that every pair of rows is a forward of its own. Use a loss over rows, such as "
                "BinaryCrossEntropyLoss."
            )
        return learned(compute)
    kind = type(_base_of(trainer.model))
    if trainer.label_smoother is not None:
        is_shifted = kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # as the smoother decides
        return Objective(compute, lambda batch: label_units(batch, is_shifted=is_shifted))
    is_from_transformers = any(base.__name__ == "PreTrainedModel" for base in kind.__mro__)
    is_known = is_from_transformers and not {"labels", "start_positions"}.isdisjoint(trainer.label_names)
    return huggingface(loss=compute) if is_known else learned(compute)


class FunctionLoss:
    """Loss of a Trainer with `compute_loss_func(outputs, labels, num_items_in_batch)`.

    `num_items_in_batch` is the number of labels of the micro-batch. A trial with twice that number shows whether the function
    divides by it; if not, its units are observed.
    """

    def __init__(self, trainer: Any, compute: LossFunction) -> None:
        self._trainer = trainer
        self._compute = compute
        self._function = trainer.compute_loss_func
        self._is_divided: bool | None = None
        self._watched = WatchedLoss(self._with_count)

    def __call__(self, model: nn.Module, batch: Batch) -> SeenLoss:
        if self._is_divided is None:
            with torch.no_grad():
                once, twice = (self._with_count(model, batch, factor) for factor in (1, 2))
            self._is_divided = bool(torch.isclose(twice, once / 2, rtol=1e-4, atol=0.0))
            if not self._is_divided and not torch.isclose(twice, once, rtol=1e-4, atol=0.0):
                raise UnitsError(
                    f"compute_loss_func gave {once.item():.6g} for num_items_in_batch={self._count(batch)} and "
                    f"{twice.item():.6g} for twice that: it neither divides by it nor leaves it alone. Give units=, a function "
                    "of the batch that returns what the loss divides by."
                )
        if not self._is_divided:
            return self._watched(model, batch)
        return SeenLoss(loss=self._with_count(model, batch), units=float(self._count(batch)), metrics={})

    def _count(self, batch: Batch) -> Number:
        return label_units(batch, is_shifted=getattr(self._trainer, "_loss_shifts_labels", False))

    def _with_count(self, model: nn.Module, batch: Batch, factor: int = 1) -> Tensor:
        count = max(int(self._count(batch)), 1) * factor
        self._trainer.compute_loss_func = lambda outputs, labels, **_: self._function(
            outputs, labels, num_items_in_batch=count
        )
        try:
            return self._compute(model, batch)
        finally:
            self._trainer.compute_loss_func = self._function


def _of_trl(trainer: Any, owner: type, compute: LossFunction) -> Objective:
    if owner.__name__ != "SFTTrainer":
        raise UnitsError(
            f"what the loss of {owner.__name__} averages over is not known. Give exact({owner.__name__}, units=...), a "
            "function of the batch, if it is a mean over something that can be counted on the batch: units=anybatch.rows for "
            "rows."
        )
    if trainer.aux_loss_enabled:
        raise UnitsError(
            "this SFTTrainer adds the load-balancing loss of a mixture of experts, which is no mean over tokens. Set "
            "router_aux_loss_coef=0.0 in its SFTConfig, or balance without it."
        )
    return Objective(compute, lambda batch: label_units(batch, is_shifted=True))


def _check_preferences(trainer: Any) -> None:
    for name in getattr(trainer, "loss_types", ()):
        if name in COUPLED_PREFERENCES:
            raise LossError(
                f"exact(DPOTrainer) with loss_type {name!r} is not built: it {COUPLED_PREFERENCES[name]}. Leave it out of "
                "loss_type, or train with the plain DPOTrainer."
            )
    if getattr(trainer, "aux_loss_enabled", False):
        raise LossError(
            f"this {type(trainer).__name__} adds the load-balancing loss of a mixture of experts, which is no mean over pairs. "
            "Set router_aux_loss_coef=0.0 in the model's configuration."
        )


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _of_sentences(trainer: Any) -> Coupled:
    loss = trainer.loss
    if isinstance(loss, Mapping):
        raise LossError(
            f"this {type(trainer).__name__} has a loss for each of {len(loss)} datasets, and a window mixes them: no one "
            "contest is over all of it. Train with one loss, or on one dataset after the other."
        )
    if getattr(loss, "gather_across_devices", False):
        raise LossError(
            f"{type(loss).__name__}(gather_across_devices=True) gathers the rows of all ranks, and so does exact(): each row "
            "would be there twice. Make the loss with gather_across_devices=False."
        )
    whole = sentence_transformers(loss)

    def encode(model: nn.Module, batch: Batch) -> Batch:
        return whole.encode(model, trainer.collect_features(batch))

    return Coupled(encode, whole.loss, units=lambda batch: 1)  # only reported: rows need not be dim 0 of features


# The window: the batches that a Trainer collects for one update, joined to one batch.

IGNORED = -100
PER_PAIR_ROWS = ("input_ids", "attention_mask", "completion_mask", "token_type_ids", "position_ids")
"""Fields of preferences: rows of the chosen answers, then rows of the rejected ones."""


class StandIn(dict[str, Any]):
    """Row with weight 0 for a rank without rows, to keep collectives matched."""


@dataclass(frozen=True, slots=True)
class EachBatch(Split):
    """Split of a window, a tuple of batches, into these batches, or into micro-batches of at most `size` rows of them.

    >>> [len(part) for part in EachBatch(2).cut((torch.zeros(3), torch.zeros(2)))]
    [2, 1, 2]
    """

    size: int | None = None

    def cut(self, window: Batch) -> MicroBatches:
        if self.size is None:
            stops = [0, *accumulate(_rows_in(batch) for batch in window)]
            rows = tuple(tuple(range(start, stop)) for start, stop in pairwise(stops))
            return MicroBatches(tuple(window), Cut(rows=rows, lengths=(0,) * len(rows)))
        return MicroBatches([part for batch in window for part in Rows(self.size).cut(batch)])

    def shrink(self, ran: MicroBatches) -> "EachBatch | None":
        largest = max(_rows_in(micro_batch) for micro_batch in ran)
        return EachBatch(largest // 2) if largest > 1 else None

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}


def _rows_in(batch: Batch) -> int:
    """Return the number of rows; of tokens in one long row with an offset per text, the number of offsets."""
    try:
        return num_rows(batch)
    except BatchError:
        return min(len(tensor) for tensor in tensors(batch) if tensor.dim() > 0)


def _joined(window: Sequence[Mapping[str, Any]], pad_id: int) -> Batch:
    """Join the rows of all batches, padded to the widest on the side that they are padded on.

    Labels are padded with the ignored index, tokens with `pad_id`, all else with 0.
    """
    given = [batch.get("attention_mask") for batch in window]
    masks = [mask for mask in given if isinstance(mask, Tensor) and mask.dim() == 2]
    is_left = any(bool(((mask[:, 0] == 0) & (mask[:, -1] != 0)).any()) for mask in masks)
    widths = {
        key: max(batch[key].shape[1] for batch in window)
        for key, value in window[0].items()
        if isinstance(value, Tensor) and value.dim() > 1
    }

    def widened(key: str, value: Any) -> Any:
        if key not in widths or value.shape[1] == widths[key]:
            return value
        missing = widths[key] - value.shape[1]
        fill = IGNORED if "label" in key else pad_id if key.endswith("input_ids") else 0
        # F.pad counts dims from the last: the pair for dim 1 comes after one for each dim behind it
        return F.pad(value, [0, 0] * (value.dim() - 2) + ([missing, 0] if is_left else [0, missing]), value=fill)

    return join_rows([{key: widened(key, value) for key, value in batch.items()} for batch in window])


def _paired(trainer: Any, batches: Sequence[Any]) -> list[Any]:
    """Reshape preferences to one row per pair."""
    return [_as_pairs(batch) for batch in batches] if is_a(trainer, *PAIRED) else list(batches)


def _as_pairs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Move [chosen; rejected] from dim 0 to dim 1.

    >>> _as_pairs({"input_ids": torch.tensor([[1], [2], [-1], [-2]])})["input_ids"][:, :, 0].tolist()
    [[1, -1], [2, -2]]
    """
    return {
        key: value.unflatten(0, (2, -1)).transpose(0, 1) if key in PER_PAIR_ROWS else value
        for key, value in batch.items()
    }


def _from_pairs(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.transpose(0, 1).flatten(0, 1) if key in PER_PAIR_ROWS else value for key, value in batch.items()}
