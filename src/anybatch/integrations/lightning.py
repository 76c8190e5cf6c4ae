"""Lightning: strategies that call `training_step` with micro-batches and step on the gradient of the whole batch.

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
"""Values logged by the running training step."""
EXTRA = "output: "
"""Prefix of values that a training step returned with its loss."""


class ExactSteps(Strategy):  # type: ignore[misc]
    """Base of the exact strategies: one batch of the loader is one update, run in micro-batches.

    Values of `self.log` are averaged by units (`reduce_fx="sum"`: added up) and logged once per batch. Numbers that
    `training_step` returns with its loss are averaged too, and tensors with one row per sample are joined.

    Args:
        micro_batch: Rows per forward and backward, `Tokens`, `Fit` or "auto", as for `Accumulator`.
        units: Function of the batch that returns what its mean loss divides by; None if torch's loss functions show it.
        batch_norm: Treatment of BatchNorm, as for `Accumulator`.
        offload: Where saved tensors go, as for `Accumulator`.
        **options: Options of the Lightning strategy that this one extends.

    Raises:
        UpdateError: In `trainer.fit`, for `accumulate_grad_batches`, manual optimization, or several devices with
            `ExactStrategy`.
    """

    # training_step runs all micro-batches and keeps their gradient, because Lightning zeroes gradients next; backward
    # then writes it to `.grad`
    _accumulator: Accumulator | None = None
    _rest: tuple[Any, ...] = ()  # arguments of a training step after the batch
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
        super().__init__(**options)
        self.micro_batch = micro_batch
        self.units, self.batch_norm, self.offload = units, batch_norm, offload

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
        """Run all micro-batches, keep their gradient for `backward`, and return the loss of the whole batch."""
        module = self.lightning_module
        _check_trainer(module.trainer, module, self)
        self._rest = rest
        accumulator = self._accumulator_of(self.model)
        parameters = list(accumulator.parameters())
        for parameter in parameters:
            parameter.grad = None  # of the previous update: Lightning zeroes it later
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
        """Write the kept gradient to `.grad`, between the hooks that Lightning calls around a backward pass."""
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
        """Step; if the loss scaler skipped the step, skip the scheduler's next step too."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 0.0 if scaler is None else scaler.get_scale()
        output = super().optimizer_step(*args, **kwargs)
        if scaler is not None and scaler.get_scale() < scale:
            steps = self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx + 1
            for one in self.lr_scheduler_configs:
                if one.interval == "step" and steps % one.frequency == 0:
                    _skip_next_step(one.scheduler)
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with the state of the split: the size that fits."""
        state_dict = getattr(self._accumulator and self._accumulator.split, "state_dict", None)
        if state_dict is not None:
            checkpoint = checkpoint | {SPLIT_KEY: state_dict()}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and keep the state of the split for the accumulator."""
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
        """Run the training step of one micro-batch; return its loss, and what it logged and returned with it."""
        metrics: dict[str, Metric] = {}
        LOGGED.set(metrics)  # of this thread: in lockstep each forward has its own
        if model is self.model:
            output = super().training_step(micro_batch, *self._rest)
        else:  # a copy for planning memory
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
        for name, value in kept.items():
            number = _detached(value)
            metrics[EXTRA + name] = PerRow(number) if number.dim() > 0 else number
        return loss, metrics


class ExactStrategy(ExactSteps, SingleDeviceStrategy):  # type: ignore[misc]
    """Exact updates on one device.

    Args:
        micro_batch: Rows per forward and backward, or a split.
        device: The device; None for the first of the trainer's accelerator.
        **options: Options of `ExactSteps` and of Lightning's `SingleDeviceStrategy`.
    """

    strategy_name = "exact"

    def __init__(self, micro_batch: MicroBatch, *, device: Any = None, **options: Any) -> None:
        super().__init__(micro_batch, device="cpu" if device is None else device, **options)
        self._is_device_given = device is not None

    @property
    def root_device(self) -> torch.device:
        """The device given, or the first of the trainer's accelerator."""
        if self._is_device_given or self.accelerator is None:
            return self._root_device  # type: ignore[no-any-return]
        kind = self.accelerator
        return kind.get_parallel_devices(kind.parse_devices(1))[0]  # type: ignore[no-any-return]


class ExactDDPStrategy(ExactSteps, DDPStrategy):  # type: ignore[misc]
    """Exact updates with DDP, which all-reduces gradients once per batch.

    Takes the arguments of `ExactSteps` and of Lightning's `DDPStrategy`.
    """

    strategy_name = "exact_ddp"


class ExactFSDP2Strategy(ExactSteps, ModelParallelStrategy):  # type: ignore[misc]
    """Exact updates of a model that is sharded with `fully_shard` in `configure_model`.

    Args:
        micro_batch: Rows per forward and backward, or a split.
        **options: Options of `ExactSteps` and of Lightning's `ModelParallelStrategy`. Without `data_parallel_size` and
            `tensor_parallel_size`, all ranks are data-parallel.
    """

    strategy_name = "exact_fsdp2"

    def __init__(self, micro_batch: MicroBatch, **options: Any) -> None:
        super().__init__(micro_batch, **options)
        self._are_sizes_given = bool({"data_parallel_size", "tensor_parallel_size"} & {*options})

    def setup_environment(self) -> None:
        """Make all ranks data-parallel unless sizes are given; Lightning's default is tensor parallelism within a node."""
        if not self._are_sizes_given:
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()


def _skip_next_step(scheduler: Any) -> None:
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
    """Let `module.log` collect values in `LOGGED`; `calls` gets the last call for each name."""

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


def _detached(value: Tensor | float) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
