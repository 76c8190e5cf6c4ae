"""`row_dropout`: dropout whose masks depend on the row of the batch, and on neither the cut nor the ranks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anybatch.core import DropoutLayer, children_of, is_in_backward, random_state, sent, without_dynamo
from anybatch.dropout.draw_finder import DrawFinder
from anybatch.dropout.row_masks import keep_mask, key_of
from anybatch.errors import DropoutError

Model = TypeVar("Model", bound=nn.Module)

_KINDS: dict[type[nn.Module], tuple[bool, bool]] = {
    nn.Dropout: (False, False),
    nn.Dropout1d: (True, False),
    nn.Dropout2d: (True, False),
    nn.Dropout3d: (True, False),
    nn.AlphaDropout: (False, True),
    nn.FeatureAlphaDropout: (True, True),
}
"""What is swapped; whether it drops whole channels, and whether it keeps mean and variance (SELU)."""
_TransformerLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
_ALPHA = -1.7580993408473766
"""What SELU tends to on the left; an alpha dropout puts it where others put 0."""


def row_dropout(model: Model, *, seed: int = 0, strict: bool = True) -> Model:
    """Swap the model's dropout layers, in place, for ones whose masks do not depend on the cut or the ranks.

    A mask is a hash of (seed, update, layer, row of the batch, place in the row). So micro-batches of 64, 16 or 1 rows, rows
    sorted by length, two ranks or four, an out-of-memory retry, the second forward of a coupled loss and a resumed run all
    drop the same. The update's number is part of the model's `state_dict`; `Accumulator` and `Update` count it up, once per
    batch, and say which rows a micro-batch holds. On several ranks these are as `Dealt` says (`GlobalBatches(...).loader()`
    yields it); of plain batches, rank 0's rows come first, then rank 1's, and so on.

    Dim 0 of what a layer is given must be the rows; a multiple of their number is read as rows times something
    (`x.flatten(0, 1)`), which is wrong for two batches stacked with `torch.cat`. Rows padded on the left and cut by `Tokens`
    have their places counted from where the padding was cut.

    Swapped are nn.Dropout, Dropout1d, 2d, 3d, AlphaDropout and FeatureAlphaDropout. Recurrent layers and attention with a
    dropout of their own are refused here by name. Functions (`F.dropout`, `scaled_dot_product_attention(dropout_p=)`) are seen
    when a micro-batch runs: a forward that moves torch's generators raises, unless `strict=False`, and then the law ends there.

    >>> model = row_dropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1)))
    >>> model[1]
    RowDropout(p=0.1)
    """
    _check(model)
    masks = Masks(seed=seed, strict=strict)
    swapped: dict[nn.Module, RowDropout] = {}
    for name, module in list(model.named_modules()):
        if type(module) in _KINDS:
            swapped[module] = RowDropout(module, masks, number=len(swapped), name=name)
    if not swapped:
        raise DropoutError(
            f"this {type(model).__name__} has no dropout layer to swap. Use row_dropout for models with nn.Dropout modules; "
            "one without dropout keeps the law as it is."
        )
    for module in list(model.modules()):
        for name, child in children_of(module).items():
            if child in swapped:
                children_of(module)[name] = swapped[child]
    return swapped.get(model, model)  # type: ignore[return-value]


@dataclass(slots=True, eq=False)
class RowsNow:
    """The rows of the micro-batch that is running."""

    numbers: tuple[int, ...]
    has_company: bool = False
    """True where another micro-batch began before this one's forward had ended."""
    calls: Counter[int] = field(default_factory=Counter)
    """How often each layer was called."""
    tensors: dict[torch.device, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> Tensor:
        """The row numbers as a tensor."""
        if device not in self.tensors:
            self.tensors[device] = sent(self.numbers, device)
        return self.tensors[device]


@dataclass(slots=True, eq=False)
class Masks:
    """What all swapped layers of one model share."""

    seed: int
    strict: bool
    update: int = 0
    """Batches begun."""
    last: RowsNow | None = None
    """The rows that ran last: what a checkpointed layer runs again for, inside backward."""
    running: list[RowsNow] = field(default_factory=list)
    """Those whose forward has not ended: several in lockstep."""
    is_watched: bool = False
    """True when a whole forward was watched, function by function, and drew nothing."""

    def begin(self) -> None:
        """A batch begins: before anything that may have to start again, so that it starts with the same masks."""
        self.update += 1

    @contextmanager
    def at(self, row_numbers: tuple[int, ...], devices: set[torch.device]) -> Iterator[None]:
        """The block in which the model runs on these rows of the batch."""
        before = random_state(devices) if self.strict else None
        finder = DrawFinder(devices) if self.strict and not self.is_watched else None
        rows = self.last = RowsNow(row_numbers)
        self.running.append(rows)
        for one in self.running:
            one.has_company = one.has_company or len(self.running) > 1
        token = _ROWS.set(rows)
        try:
            with finder or nullcontext():
                yield
        finally:
            _ROWS.reset(token)
            self.running.remove(rows)
        if before is not None and not before.is_now():
            drawn = finder.found if finder is not None and finder.found is not None else "something in it"
            raise DropoutError(
                f"this forward drew random numbers beside the layers that row_dropout swapped ({drawn}), so that its result "
                "depends on the cut. Make a dropout function an nn.Dropout module, or set its p to 0 (of transformers models, "
                "the config's attention dropout). row_dropout(model, strict=False) lets it be."
            )
        self.is_watched = True


_ROWS: ContextVar[RowsNow | None] = ContextVar("anybatch_rows", default=None)
"""By context, because micro-batches in lockstep run in threads."""


class RowDropout(DropoutLayer):
    """A dropout layer that was swapped by `row_dropout`."""

    def __init__(self, stock: Any, masks: Masks, *, number: int, name: str) -> None:
        super().__init__(stock.p, stock.inplace)
        self.is_feature, self.is_alpha = _KINDS[type(stock)]
        self.masks = masks
        self.number = number
        self.name = name
        self.training = stock.training

    def forward(self, x: Tensor) -> Tensor:
        """Zero with probability p and scale the rest by 1 / (1 - p); in evaluation, nothing."""
        if not self.training or self.p == 0:
            return x
        keep = self._keep(x)
        if self.is_alpha:
            scale = ((1 - self.p) * (1 + self.p * _ALPHA**2)) ** -0.5 if self.p < 1 else 0.0
            return torch.where(keep, x, _ALPHA).mul(scale).sub(scale * _ALPHA * self.p)
        return torch.where(keep, x, 0).mul(1 / (1 - self.p) if self.p < 1 else 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def get_extra_state(self) -> Tensor:
        """The number of the update, for the model's `state_dict`: no buffer, which DDP would send around at each forward."""
        return torch.tensor(self.masks.update)

    def set_extra_state(self, state: Tensor) -> None:
        """Go on from there."""
        self.masks.update = int(state)

    @without_dynamo  # a compiled forward stops here: compiled in, every update's number would be compiled anew
    def _keep(self, x: Tensor) -> Tensor:
        rows, call = self._rows()
        count = len(rows.numbers)
        if x.dim() == 0 or x.shape[0] % count != 0:
            raise DropoutError(
                f"{self.name} was given shape {tuple(x.shape)} in a micro-batch of {count} rows: dim 0 must be the rows, or a "
                "multiple of them. Put rows first (batch_first=True), or leave this layer as it is: row_dropout on the "
                "parts of the model that have rows first."
            )
        shape = x.shape[1:2] if self.is_feature else x.shape[1:]
        per_row = x.shape[0] // count
        masks = self.masks
        key = key_of(masks.seed, masks.update, self.number, call)
        keep = keep_mask(key, rows.on(x.device), shape if per_row == 1 else (per_row, *shape), 1 - self.p)
        return keep.reshape(x.shape[0], *shape, *[1] * (x.dim() - 1 - len(shape)))

    def _rows(self) -> tuple[RowsNow, int]:
        """The rows that are running, and how often this layer was called for them before."""
        rows, last = _ROWS.get(), self.masks.last
        if rows is not None:
            rows.calls[self.number] += 1
            return rows, rows.calls[self.number] - 1
        if last is None or not is_in_backward():
            raise DropoutError(
                f"{self.name} ran in training outside an update, so its rows have no numbers. Give the batch to "
                "Update or Accumulator, or call model.eval() first."
            )
        if last.has_company or last.calls[self.number] > 1:
            raise DropoutError(
                f"{self.name} runs again inside backward (checkpointing), and "
                + ("micro-batches went in lockstep" if last.has_company else "was called more than once in the forward")
                + ": which mask it had cannot be told. Leave it out of the checkpointed part, or use a layer for each call."
            )
        return last, 0


def masks_of(model: nn.Module) -> Masks | None:
    """What the swapped layers of `model` share; None where there are none."""
    return next((module.masks for module in model.modules() if isinstance(module, RowDropout)), None)


def hold_numbers(every: Iterable[Masks]) -> Callable[[], None]:
    """What puts the numbers of updates back to what they are now."""
    held = [(masks, masks.update) for masks in every]

    def put_back() -> None:
        for masks, update in held:
            masks.update = update

    return put_back


def rows_running(model: nn.Module, row_numbers: Iterable[int]) -> AbstractContextManager[None]:
    """The block in which `model` runs on these rows of the batch, for a model with swapped layers."""
    masks = masks_of(model)
    devices = {parameter.device for parameter in model.parameters()}
    return nullcontext() if masks is None else masks.at(tuple(row_numbers), devices)


def count_update(model: nn.Module) -> None:
    """A batch begins, for a model with swapped layers."""
    masks = masks_of(model)
    if masks is not None:
        masks.begin()


def _check(model: nn.Module) -> None:
    """Refuse what would go on drawing its own masks, or has rows elsewhere than in dim 0."""
    for name, module in model.named_modules():
        kind, fix = type(module).__name__, ""
        dropout = getattr(module, "dropout", 0)
        has_own = isinstance(dropout, int | float) and dropout > 0
        if isinstance(module, RowDropout):
            fix = "was swapped already. Call row_dropout once, on the whole model"
        elif isinstance(module, nn.RNNBase) and has_own and module.num_layers > 1:
            fix = f"draws its own masks between layers. Use dropout=0 and {module.num_layers} layers with nn.Dropout between"
        elif isinstance(module, nn.MultiheadAttention) and has_own:
            fix = "draws its own masks on attention weights. Set its .dropout = 0.0, or write attention with an nn.Dropout"
        elif isinstance(module, _TransformerLayer) and not module.self_attn.batch_first:
            fix = "takes time first and rows second. Make it with batch_first=True"
        elif isinstance(module, DropoutLayer) and type(module) not in _KINDS:
            fix = "is a dropout of its own kind. Replace it by torch's"
        if fix:
            raise DropoutError(f"row_dropout cannot be exact here: {name or 'the model'} ({kind}) {fix}.")
