"""Parts that an update cannot be put together from, refused by name."""

from collections.abc import Collection
from typing import Any

from torch import nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ReduceLROnPlateau

from anybatch.core.learner import check_model
from anybatch.core.objective import Coupled, Objective
from anybatch.errors import UpdateError


def check_parts(model: nn.Module, optimizer: Any, scaler: object, scheduler: object) -> None:
    """Refuse what is no optimizer, scaler or scheduler, or does not belong to the model."""
    check_model(model)
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        raise UpdateError(f"optimizer={optimizer!r} is a {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    if isinstance(optimizer, LBFGS):
        raise UpdateError(
            "LBFGS evaluates the batch several times per step, through a closure. Use Accumulator: "
            "optimizer.step(closure), where closure() zeroes the gradients and returns accumulator.backward(batch).loss."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UpdateError(
            "ReduceLROnPlateau steps on a validation loss, not once per update. Leave scheduler=None and call "
            "scheduler.step(validation_loss) yourself."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UpdateError(f"scheduler={scheduler!r:.80}: expected one of torch.optim.lr_scheduler, or None.")
    if scaler is not None and not hasattr(scaler, "unscale_"):
        raise UpdateError(f"scaler={scaler!r:.80}: expected a torch.amp.GradScaler, or None.")
    own = set(model.parameters())
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UpdateError(
            f"the optimizer holds none of the parameters of this {type(model).__name__}, so no update could change it. Make "
            "the optimizer from model.parameters(), after the model got its final parameters."
        )


def check_loss_parameters(model: nn.Module, objective: Objective | Coupled, stepped: Collection[nn.Parameter]) -> None:
    """Refuse a loss with a parameter that gets gradients and never moves, because the optimizer does not hold it."""
    held = {*model.parameters(), *stepped}
    names = {parameter: name for name, parameter in _named(objective)}
    for parameter in objective.parameters():
        if parameter.requires_grad and parameter not in held:
            raise UpdateError(
                f"the loss has a learned parameter, {names.get(parameter, '')!r} of shape {tuple(parameter.shape)}, that the "
                "optimizer does not hold: it would never move, and its gradient would grow from batch to batch. Give it to the "
                "optimizer, AdamW([*model.parameters(), *objective.parameters()]), or freeze it: info_nce(learned=False), "
                "requires_grad_(False)."
            )


def _named(objective: Objective | Coupled) -> list[tuple[str, nn.Parameter]]:
    return list(objective.loss.named_parameters()) if isinstance(objective.loss, nn.Module) else []
