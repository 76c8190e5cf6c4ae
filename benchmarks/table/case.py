"""What is to be learnt: rows, a model, a batch, and what else one update has to get right."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, default_collate

from anybatch import Coupled, Objective

LR = 0.05
INPUTS = ("input_ids", "pixel_values", "input_features")
OUTPUTS = ("logits", "start_logits", "log_probs")


def later(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The model that `make` would make now, made when it is first asked for: frameworks take seconds to load."""
    state = torch.get_rng_state()

    @cache
    def model() -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(state)
            return make()

    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    kind: str = "any"
    """Who is asked: "any" loop; for a "head" of transformers and the like, the frameworks; "pairs" are
    sentence-transformers' own, "SFT" and "DPO" TRL's."""
    rows: Sequence[Any]
    model: Callable[[], nn.Module]
    """The one that all start from: to be copied, not trained."""
    loss: Callable[[nn.Module, Any], Tensor]
    """The loss of (model, batch) as a user writes it: a mean over the rows, tokens or weights that it is given."""
    objective: Objective | Coupled
    """The same as anybatch is told it."""
    batch: int
    micro_batch: int
    epochs: int = 1
    ranks: int = 1
    collate: Callable[[list[Any]], Any] = default_collate
    precise_loss: Callable[[nn.Module, Any], Tensor] | None = None
    """The loss in float64, where the model's own computes it in fp32 whatever its weights."""
    clip_norm: float | None = None
    is_scheduled: bool = False
    is_scaled: bool = False
    """Runs with a `GradScaler`, which leaves out a window whose gradient is not finite."""
    left_out: tuple[int, ...] = ()
    """The batches, by number, that hold an inf and must not be learnt from."""
    are_rows_coupled: bool = False
    """Rows look at each other, so that no row has a weight of its own."""
    are_weights_seen: bool = True
    """False of a model whose outputs are not the same to all: then no row's weight is compared."""
    limit: float = 5e-7
    """What the gradient's relative error may be to pass as exact."""

    @property
    def micro_batches(self) -> int:
        """Backward passes of one rank in a full window."""
        return self.batch // self.micro_batch // self.ranks

    @property
    def num_updates(self) -> int:
        """How many batches there are, those that must be left out among them."""
        return self.epochs * math.ceil(len(self.rows) / self.batch)

    def wanted(self) -> list[range]:
        """The row numbers of each update that should be made, in order."""
        starts = range(0, len(self.rows), self.batch)
        once = [range(start, min(start + self.batch, len(self.rows))) for start in starts]
        return [rows for number, rows in enumerate(once * self.epochs) if number not in self.left_out]

    def has_target(self, number: int) -> bool:
        """False for a row whose targets are all ignored: it has no weight in any batch."""
        row = self.rows[number]
        return not isinstance(row, dict) or "labels" not in row or bool((row["labels"] != -100).any())

    @property
    def wanted_lr(self) -> float:
        """Where a linear decay to 0 over all updates should end, as a share of where it began."""
        return len(self.left_out) / self.num_updates if self.is_scheduled else 1.0

    def loader(self, rows: int, **options: Any) -> DataLoader[Any]:
        """All rows in their order, so many at a time."""
        return DataLoader(self.rows, batch_size=rows, collate_fn=self.collate, **options)

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR | None:
        """Linear to 0 over `num_steps`, where the case has one."""
        return linear_decay(optimizer, num_steps) if self.is_scheduled else None

    def scaler(self) -> torch.amp.GradScaler | None:
        """A loss scale on the CPU, where the case has one."""
        return torch.amp.GradScaler("cpu", init_scale=2.0**12) if self.is_scaled else None


def linear_decay(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """The learning rate falls in a straight line to 0, and stays there."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a model was called with."""
    inputs: Tensor = args[0] if args else next(kwargs[name] for name in INPUTS if name in kwargs)
    return inputs


def outputs_of(output: Any) -> Tensor:
    """What a model answered, with a part for each row; fused heads of TRL give no logits."""
    if isinstance(output, Tensor):
        return output
    found: Tensor = next(output[name] for name in OUTPUTS if output.get(name) is not None)
    return found


def first_of(row: Any) -> Tensor:
    """What a row is told by."""
    return torch.as_tensor(inputs_of((), row) if isinstance(row, dict) else row[0])


def key_of(inputs: Tensor) -> tuple[float, ...]:
    """What tells one row from all others, however it is padded: tokens are above 0, and 0 is padding."""
    return tuple((inputs.flatten() if inputs.is_floating_point() else inputs[inputs > 0]).tolist())
