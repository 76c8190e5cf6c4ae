"""`anybatch trace`: record one update stage by stage, and one sample layer by layer, with real shapes and numbers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from anybatch.app.records.schema import Trace, TracedImage, TracedLayer, TracedStage
from anybatch.app.training.experiment import Experiment
from anybatch.app.training.loop import first_batch
from anybatch.app.training.measure import observed
from anybatch.core import Batch, events, gradient_norm, move, num_rows, take_rows, tensors

MOST_VALUES = 12
"""Sample values per entry; a prediction is shown if the model has no more classes than this."""
TIMED = 5
"""Updates over which the median time of each stage is taken."""
LARGEST = 64
"""Pixels per side; larger images are scaled down."""
Timed = tuple[str, int | None]
"""(stage, micro-batch); the micro-batch is None for the whole batch."""


def trace(experiment: Experiment) -> Trace:
    """Record the first update of the run, and then its first row on its way through the updated model."""
    loaded = first_batch(experiment.task, batch=experiment.plan.batch, seed=experiment.settings.seed)
    batch = move(loaded, experiment.device)
    entries, layers = _trace_update(experiment, batch), _trace_layers(experiment, batch)
    sample = next(tensors(take_rows(batch, slice(0, 1))), None)
    image = None if sample is None else image_of(sample)
    stages = with_medians(entries, _seconds(experiment, batch))
    return Trace(stages=stages, layers=layers, images=() if image is None else (image,))


def _trace_update(experiment: Experiment, batch: Batch) -> tuple[TracedStage, ...]:
    update = experiment.update
    watcher = _Watcher(update.parameters(), batch)
    update.model.train()
    with observed(update, watcher):
        update(batch)
        # the next update begins with zeroing; its later events are ignored
        update(batch)
    return tuple(watcher.stages)


def _seconds(experiment: Experiment, batch: Batch) -> dict[Timed, list[float]]:
    """Time every stage in further updates; their weights are not used."""
    found: dict[Timed, list[float]] = defaultdict(list)

    def note(event: events.Event) -> None:
        found[type(event).__name__.lower(), event.micro_batch].append(event.seconds)

    with observed(experiment.update, note):
        for _ in range(TIMED):
            experiment.update(batch)
    return found


def with_medians(entries: Iterable[TracedStage], seconds: Mapping[Timed, Sequence[float]]) -> tuple[TracedStage, ...]:
    """Replace the time of each entry by the median of several updates."""
    return tuple(
        replace(entry, facts={**entry.facts, "seconds": median(seconds[entry.stage, entry.micro_batch])})
        if "seconds" in entry.facts and seconds.get((entry.stage, entry.micro_batch))
        else entry
        for entry in entries
    )


class _Watcher:
    """Observer that turns events into entries at once, because `.grad` and the weights change soon after."""

    def __init__(self, parameters: list[nn.Parameter], batch: Batch) -> None:
        self.stages: list[TracedStage] = []
        self._is_open = True
        self._parameters = parameters
        self._weights = [parameter.detach().clone() for parameter in parameters]
        self._batch_loss = 0.0
        self._norm_before_clip: float | None = None
        self._first_sum: Tensor | None = None
        self._has_begun = False
        self._units = 0.0
        self._add(None, "load", "the whole batch", {"rows": num_rows(batch), "shapes": _shapes(tensors(batch))}, batch)

    def __call__(self, event: events.Event) -> None:
        if not self._is_open:
            return
        match event:
            case events.Load():
                facts = {"rows": num_rows(event.batch), "shapes": _shapes(tensors(event.batch))}
                self._add(event, "load", "a micro-batch on the model's device", facts, event.batch)
            case events.Forward():
                facts = {} if event.output is None else {"output": _shapes(tensors(event.output))}
                title = "the model's output" if facts else "all rows, layer by layer together"
                self._add(event, "forward", title, facts, event.output)
            case events.Loss():
                self._loss(event)
            case events.Backward():
                self._backward(event)
            case events.Accumulate():
                norm = float(gradient_norm(event.parameters))
                facts = {"gradient norm so far": norm, "of": _first_name(event.parameters)}
                self._add(event, "accumulate", "the sum in .grad has grown", facts, _first_grad(event.parameters))
            case events.Clip():
                self._norm_before_clip = float(event.grad_norm)
            case events.Step():
                self._step(event)
            case events.Zero() if self._has_begun:
                left = sum(parameter.grad is not None for parameter in event.parameters)
                facts = {"gradients left": left, "parameters": len(event.parameters), ".grad": "None"}
                self._add(event, "zero", "the next update begins: gradients are cleared", facts, None)
                self._is_open = False
            case _:
                pass
        self._has_begun = True  # the first event is this update's own zeroing

    def _backward(self, event: events.Backward) -> None:
        """Add the first parameter's gradient of this micro-batch: `.grad` now minus `.grad` before."""
        total, added = _first_grad(self._parameters), None
        if total is not None:
            added = total.detach().clone() if self._first_sum is None else total.detach() - self._first_sum
            self._first_sum = total.detach().clone()
        facts = ({} if added is None else {"its norm": float(added.norm())}) | {"of": _first_name(self._parameters)}
        rows = "all rows'" if event.micro_batch is None else "this micro-batch's"
        self._add(event, "backward", f"{rows} gradients are computed and added", facts, added)

    def _loss(self, event: events.Loss) -> None:
        loss = float(event.loss)
        self._batch_loss += event.share * loss
        self._units += event.units
        facts = {"loss": loss, "units": float(event.units), "share": event.share}
        facts["adds to the batch's loss"] = event.share * loss
        self._add(event, "loss", "the mean loss of this micro-batch and its share", facts, event.loss)

    def _step(self, event: events.Step) -> None:
        facts = {"loss": self._batch_loss, "units": self._units}
        self._add(None, "loss", "the loss of the whole batch: the shares add up", facts, None)
        norm = float(gradient_norm(self._parameters))
        name, before_clip = _first_name(self._parameters), self._norm_before_clip
        total: dict[str, Any] = {"gradient norm": norm if before_clip is None else before_clip, "of": name}
        summed = _first_grad(self._parameters) if before_clip is None else self._first_sum
        self._add(None, "accumulate", "the gradient of the whole batch", total, summed)
        if before_clip is not None:
            norms: dict[str, Any] = {"norm before": before_clip, "norm after": norm, "of": name}
            self._add(None, "clip", "the whole gradient is made shorter, once", norms, _first_grad(self._parameters))
        weights = zip(self._parameters, self._weights, strict=True)
        moved = [float((parameter.detach() - before).norm()) for parameter, before in weights]
        self._add(event, "step", "the weights before", {"of": name}, self._weights[0].flatten())
        change = {"applied": str(event.applied), "change of all weights (norm)": sum(one**2 for one in moved) ** 0.5}
        self._add(event, "step", "the weights after", change, self._parameters[0].detach().flatten())

    def _add(self, event: events.Event | None, stage: str, title: str, facts: dict[str, Any], values: Any) -> None:
        micro_batch = None if event is None else event.micro_batch
        facts |= {} if event is None else {"seconds": event.seconds}
        shown = _first_values(values)
        self.stages.append(TracedStage(stage=stage, micro_batch=micro_batch, title=title, facts=facts, values=shown))


def _trace_layers(experiment: Experiment, batch: Batch) -> tuple[TracedLayer, ...]:
    """Record one row in every module that calls no other, in the order of the calls."""
    model, objective = experiment.task.model, experiment.task.whole_objective
    layers: list[TracedLayer] = []
    calls: list[int] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        calls.append(len(layers))

    def leave(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if calls.pop() == len(layers):  # it called no other module
            before, after = (tuple(tuple(tensor.shape) for tensor in tensors(found)) for found in (inputs, output))
            kind, values = type(module).__name__, _first_values(output)
            layers.append(
                TracedLayer(name=name or "model", kind=kind, shapes_in=before, shapes_out=after, values=values)
            )

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(partial(leave, name)))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            objective.loss(model, take_rows(batch, slice(0, 1)))
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return (*layers, *_prediction(layers, batch))


def _prediction(layers: Sequence[TracedLayer], batch: Batch) -> tuple[TracedLayer, ...]:
    """Return the last entry of a classifier: probabilities, class and label of the row."""
    found = list(tensors(batch))
    if not layers or len(found) != 2 or found[1].dim() != 1 or found[1].is_floating_point():
        return ()
    shape = layers[-1].shapes_out[0] if layers[-1].shapes_out else ()
    if len(shape) != 2 or not 1 < int(shape[1]) <= MOST_VALUES:
        return ()
    probabilities = torch.tensor(layers[-1].values).softmax(0)
    guess, label = int(probabilities.argmax()), int(found[1][0])
    name = f"class {guess} ({float(probabilities[guess]):.1%}), label {label}: {'right' if guess == label else 'wrong'}"
    values = tuple(float(each) for each in probabilities)
    return (TracedLayer(name=name, kind="prediction", shapes_in=(shape,), shapes_out=((1,),), values=values),)


def _first_values(value: Any) -> tuple[float, ...]:
    first = None if value is None else next(tensors(value), None)
    if first is None:
        return ()
    return tuple(float(number) for number in first.detach().flatten()[:MOST_VALUES].float().tolist())


def image_of(row: Tensor) -> TracedImage | None:
    """Return the picture of a (1, channels, height, width) row with one or three channels; None for any other row.

    The lowest number is black and the highest white, because the task's normalisation is not known.
    """
    if row.dim() != 4 or row.shape[1] not in (1, 3) or min(row.shape[2:]) < 4 or not row.is_floating_point():
        return None
    seen = row.detach().float().cpu()
    seen = adaptive_avg_pool2d(seen, (min(seen.shape[2], LARGEST), min(seen.shape[3], LARGEST)))[0]
    low, high = seen.min(), seen.max()
    if not bool((high - low).isfinite() & (high > low)):
        return None
    levels = ((seen - low) * (255 / (high - low))).round().int().permute(1, 2, 0)
    height, width, channels = levels.shape
    return TracedImage(width=width, height=height, channels=channels, pixels=tuple(levels.flatten().tolist()))


def _shapes(found: Iterable[Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in found)


def _first_name(parameters: Iterable[nn.Parameter]) -> str:
    return f"parameter 0, {tuple(next(iter(parameters)).shape)}"


def _first_grad(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    grad = next(iter(parameters)).grad
    return grad.to_dense() if grad is not None and grad.is_sparse else grad
