"""Lightning: a strategy under which `training_step` gets micro-batches, and the optimizer the whole batch's gradient.

    trainer = lightning.Trainer(strategy=ExactStrategy(micro_batch=16))

The loader yields the batch that one update learns from. The module stays as it is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from anybatch.core import (
    Accumulator,
    Batch,
    BatchNorm,
    Dealt,
    Metric,
    MicroBatch,
    Objective,
    Offload,
    PerRow,
    Sum,
    Units,
    num_rows,
    takes_fp32_gradients,
)
from anybatch.errors import LossError, UpdateError
from anybatch.objectives import learned
from anybatch.parallel import check_ranks, unwrapped, warn_of_repeated_rows

SPLIT_KEY = "anybatch_split"
"""Key of the split's state in a checkpoint."""
LOGGED: ContextVar[dict[str, Metric]] = ContextVar("LOGGED")
"""Values logged by the training step at hand."""
EXTRA = "output: "
"""Prefix of values that a training step returned beside its loss."""


class ExactSteps(Strategy):  # type: ignore[misc]
    """Base of the exact strategies.

    `training_step` runs all micro-batches and keeps their gradient aside, because Lightning zeroes gradients next; `backward`
    hands it over. Options are those of `Accumulator`; `units` is what the loss of a batch divides by, where that cannot be seen
    as it runs. What `self.log` was given is collected, averaged by units, and logged once. A number that a step returns
    beside its loss is averaged too, and a tensor with a row for each row of the micro-batch is joined.
    """

    _accumulator: Accumulator | None = None
    _rest: tuple[Any, ...] = ()
    """Arguments of a training step after the batch."""
    _gradient: list[tuple[nn.Parameter, Tensor]] | None = None
    _returns_mapping = False
    _saved_split: Mapping[str, Any] | None = None

    def __init__(
        self,
        micro_batch: MicroBatch,
        *,
        units: Units | None = None,
        batch_norm: BatchNorm | None = None,
        offload: Offload = "auto",
        **options: Any,
    ) -> None:
        super().__init__(**options)  # of the Lightning strategy that this one is
        self.micro_batch = micro_batch
        self.units = units
        self.batch_norm: BatchNorm | None = batch_norm
        self.offload: Offload = offload

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self._accumulator = None
        if self.lightning_module is not None and trainer.training:
            _check_trainer(trainer, self.lightning_module, self)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, Dealt):
            return replace(batch, batch=super().batch_to_device(batch.batch, device, dataloader_idx))
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Return the loss of the whole batch; its gradient is kept for `backward`."""
        module = self.lightning_module
        _check_trainer(module.trainer, module, self)
        self._rest = rest
        accumulator = self._accumulator_of(self.model)
        parameters = list(accumulator.parameters())
        for parameter in parameters:
            parameter.grad = None  # of the update before: Lightning would zero them next
        calls: dict[str, dict[str, Any]] = {}
        with _collected(module, calls):
            result = accumulator.backward(batch, scaler=getattr(self.precision_plugin, "scaler", None))
        self._gradient = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        batch_size = len(batch.row_numbers) if isinstance(batch, Dealt) else num_rows(batch)
        for name, call in calls.items():
            options = {"batch_size": batch_size} | call["options"]
            module.log(name, result.metrics.get(name, call["value"]), *call["args"], **options)
        loss = result.loss.to(self.root_device)
        extras = {name.removeprefix(EXTRA): value for name, value in result.metrics.items() if name.startswith(EXTRA)}
        return {"loss": loss, **extras} if self._returns_mapping else loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over the gradient that `training_step` left, between the hooks that Lightning calls around a backward pass."""
        if self._gradient is None:
            loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        module = self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in self._gradient:
            parameter.grad = gradient
        self._gradient = None
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's; a schedule waits for the step that the loss scale left out, or the two would no longer agree."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 0.0 if scaler is None else scaler.get_scale()
        output = super().optimizer_step(*args, **kwargs)
        if scaler is not None and scaler.get_scale() < scale:
            steps = self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx + 1
            for one in self.lr_scheduler_configs:
                if one.interval == "step" and steps % one.frequency == 0:
                    _hold(one.scheduler)
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Lightning's, with what was learnt of what fits."""
        state_dict = getattr(self._accumulator and self._accumulator.split, "state_dict", None)
        if state_dict is not None:
            checkpoint = checkpoint | {SPLIT_KEY: state_dict()}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Lightning's; the split goes on as it was."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._saved_split = checkpoint.get(SPLIT_KEY)
        return checkpoint

    def _accumulator_of(self, model: Any) -> Accumulator:
        if self._accumulator is None:
            own = {parameter for one in self.optimizers for group in one.param_groups for parameter in group["params"]}
            self._accumulator = Accumulator(
                model,
                learned(self._compute) if self.units is None else Objective(self._compute, self.units),
                micro_batch=self.micro_batch,
                batch_norm=self.batch_norm,
                offload=self.offload,
                parameters=lambda: [*model.parameters(), *(own - {*model.parameters()})],
                keep_fp32=takes_fp32_gradients(self.optimizers[0]),
                optimizer=self.optimizers[0],
            )
            trainer = self.lightning_module.trainer
            check_ranks(model, self._accumulator.parallelism.ranks, trainer.world_size)
            warn_of_repeated_rows(trainer.train_dataloader, rank=trainer.global_rank, ranks=trainer.world_size)
            if self._saved_split is not None and hasattr(self._accumulator.split, "load_state_dict"):
                self._accumulator.split.load_state_dict(self._saved_split)
        return self._accumulator

    def _compute(self, model: nn.Module, micro_batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """Run the training step of one micro-batch; return its loss, and all that it logged and returned beside it."""
        metrics: dict[str, Metric] = {}
        LOGGED.set(metrics)  # of this thread: forwards that wait for each other take turns
        if model is self.model:
            output = super().training_step(micro_batch, *self._rest)
        else:  # a copy, on which memory is planned
            module: Any = unwrapped(model)
            with self.precision_plugin.train_step_context(), _collected(module, {}):
                output = module.training_step(micro_batch, *self._rest)
        self._returns_mapping = isinstance(output, Mapping)
        extras = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss = extras.pop("loss", None)
        if not isinstance(loss, Tensor):
            raise LossError(
                f"training_step returned {type(output).__name__} for a micro-batch; expected its mean loss, or a dict with "
                "'loss'. To leave rows out of the batch, leave them out of the mean, or of the loader."
            )
        kept = {name: value for name, value in extras.items() if isinstance(value, Tensor | int | float)}
        return loss, metrics | {EXTRA + name: _metric(value) for name, value in kept.items()}


class ExactStrategy(ExactSteps, SingleDeviceStrategy):  # type: ignore[misc]
    """One device. The options are those of `ExactSteps`; all others are Lightning's `SingleDeviceStrategy`'s."""

    strategy_name = "exact"

    def __init__(self, micro_batch: MicroBatch, *, device: Any = None, **options: Any) -> None:
        super().__init__(micro_batch, device="cpu" if device is None else device, **options)
        self._is_device_given = device is not None

    @property
    def root_device(self) -> torch.device:
        """The one given, or the first of the trainer's accelerator."""
        if self._is_device_given or self.accelerator is None:
            return self._root_device  # type: ignore[no-any-return]
        kind = self.accelerator
        return kind.get_parallel_devices(kind.parse_devices(1))[0]  # type: ignore[no-any-return]


class ExactDDPStrategy(ExactSteps, DDPStrategy):  # type: ignore[misc]
    """A process per device, gradients reduced once per batch. The options are those of `ExactSteps` and of `DDPStrategy`."""

    strategy_name = "exact_ddp"


class ExactFSDP2Strategy(ExactSteps, ModelParallelStrategy):  # type: ignore[misc]
    """Parameters sharded by `fully_shard` in `configure_model`. Options: those of `ExactSteps` and `ModelParallelStrategy`."""

    strategy_name = "exact_fsdp2"

    def __init__(self, micro_batch: MicroBatch, **options: Any) -> None:
        super().__init__(micro_batch, **options)
        self._are_sizes_given = bool({"data_parallel_size", "tensor_parallel_size"} & {*options})

    def setup_environment(self) -> None:
        """Rows on all ranks, where nothing else was asked for: Lightning would cut tensors over those of a node."""
        if not self._are_sizes_given:
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()


def _hold(scheduler: Any) -> None:
    """Let the next step of a scheduler, which comes before anything else looks at it, do nothing."""
    scheduler.step = lambda *_: vars(scheduler).pop("step")


def _check_trainer(trainer: Any, module: Any, strategy: Any) -> None:
    name = type(strategy).__name__
    if trainer.accumulate_grad_batches > 1:
        raise UpdateError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} beside {name}: two would cut the batch. Let the loader "
            f"yield the whole batch, {trainer.accumulate_grad_batches} times as large, and leave accumulate_grad_batches at 1."
        )
    if not module.automatic_optimization:
        raise UpdateError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False), where {name} has no step to put the "
            "gradient into. Use anybatch.Update in its training_step, with the plain strategy of Lightning."
        )
    if isinstance(strategy, SingleDeviceStrategy) and trainer.num_devices > 1:
        raise UpdateError(
            f"devices={trainer.num_devices} with {name}, which runs one. Use ExactDDPStrategy or ExactFSDP2Strategy."
        )


@contextmanager
def _collected(module: Any, calls: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Let `module.log` collect for the pass at hand; `calls` keeps how each name was logged last."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        calls[name] = {"value": value, "args": args, "options": options}
        if isinstance(value, Tensor | int | float):
            LOGGED.get()[name] = _logged(name, value, options.get("reduce_fx", "mean"))

    before = module.__dict__.get("log")
    module.__dict__["log"] = log
    try:
        yield
    finally:
        del module.__dict__["log"]
        if before is not None:
            module.__dict__["log"] = before


def _logged(name: str, value: Tensor | float, reduce_fx: Any) -> Metric:
    if reduce_fx in ("sum", sum, torch.sum):
        return Sum(_detached(value))
    if reduce_fx in ("mean", torch.mean):
        return _detached(value)
    raise LossError(
        f"self.log({name!r}, reduce_fx={reduce_fx!r}) in training_step: of micro-batches, a mean is weighted by units and a "
        "sum added up. Log it with one of these, or in on_train_batch_end."
    )


def _metric(value: Tensor | float) -> Metric:
    number = _detached(value)
    return PerRow(number) if number.dim() > 0 else number


def _detached(value: Tensor | float) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
