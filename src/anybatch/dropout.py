"""`row_dropout`: dropout masks that depend on the row of the batch, and neither on the split nor on the ranks."""

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anybatch.core import (
    Batch,
    Dealt,
    DropoutLayer,
    MicroBatches,
    PassHook,
    Ranks,
    children_of,
    disable_dynamo,
    is_in_backward,
    num_rows,
    random_state,
    tensor_on,
)
from anybatch.errors import DropoutError

Model = TypeVar("Model", bound=nn.Module)

_FEATURE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
"""Layers that drop whole channels."""
_ALPHA_KINDS = (nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Layers that keep mean and variance (SELU)."""
_KINDS = (nn.Dropout, nn.AlphaDropout, *_FEATURE)
"""Layers that are replaced."""
_TransformerLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
_ALPHA = -1.7580993408473766
"""SELU's limit on the left, which alpha dropout writes instead of 0."""


def row_dropout(model: Model, *, seed: int = 0, strict: bool = True) -> Model:
    """Replace the model's dropout layers, in place, by ones with masks that do not depend on the split or the ranks.

    A mask is a hash of (seed, update, layer, row of the batch, place in the row). So any size of micro-batches, rows sorted by
    length, any number of ranks, an out-of-memory retry, the second forward of a coupled loss and a resumed run drop the same
    values. `Accumulator` and `Update` count the updates, and the model's `state_dict` holds their number. On several ranks a
    `Dealt` batch says which rows a rank has (`GlobalBatches(...).loader()` yields it); in plain batches, rank 0's rows come
    first, then rank 1's, and so on.

    Dim 0 of a layer's input must be the rows. A multiple of their number is read as rows times something (`x.flatten(0, 1)`),
    which is wrong for two batches joined by `torch.cat`. In rows padded on the left that `Tokens` has trimmed, places count
    from where the padding was cut off.

    Args:
        model: Model with nn.Dropout, Dropout1d, 2d, 3d, AlphaDropout or FeatureAlphaDropout layers.
        seed: Seed of the masks.
        strict: Raise an error in an update if the forward draws random numbers elsewhere (`F.dropout`,
            `scaled_dot_product_attention(dropout_p=)`), which then depend on the split.

    Returns:
        The model; its replacement if it is a dropout layer itself.

    Raises:
        DropoutError: If the model has no dropout layer, or one that cannot be replaced, such as that of a recurrent layer.

    >>> model = row_dropout(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1)))
    >>> model[1]
    RowDropout(p=0.1)
    """
    _check(model)
    masks = Masks(seed=seed, strict=strict)
    stock = [(name, module) for name, module in model.named_modules() if type(module) in _KINDS]
    swapped = {one: RowDropout(one, masks, number=number, name=name) for number, (name, one) in enumerate(stock)}
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


def _check(model: nn.Module) -> None:
    """Refuse layers that draw their own masks, or have rows in another dim than 0."""
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


@dataclass(slots=True, eq=False)
class RowsNow:
    """The rows of the micro-batch that is running."""

    numbers: tuple[int, ...]
    has_company: bool = False
    """True if another micro-batch began before this one's forward had ended."""
    calls: Counter[int] = field(default_factory=Counter)
    """Number of calls of each layer."""
    tensors: dict[torch.device, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> Tensor:
        if device not in self.tensors:
            self.tensors[device] = tensor_on(self.numbers, device)
        return self.tensors[device]


_ROWS: ContextVar[RowsNow | None] = ContextVar("anybatch_rows", default=None)
"""The rows that run in this thread; micro-batches in lockstep have threads of their own."""


@dataclass(slots=True, eq=False)
class Masks:
    """State that all replaced layers of one model share."""

    seed: int
    strict: bool
    update: int = 0
    """Number of batches begun."""
    last: RowsNow | None = None
    """The rows that ran last, for which a checkpointed layer runs again inside backward."""
    running: list[RowsNow] = field(default_factory=list)
    """Rows whose forward has not ended; several in lockstep."""
    is_watched: bool = False
    """True once a whole forward was watched, function by function, and drew nothing."""

    def begin(self) -> None:
        """Count a batch, before anything that may be retried, so that a retry has the same masks."""
        self.update += 1

    @contextmanager
    def at(self, row_numbers: tuple[int, ...], devices: set[torch.device]) -> Iterator[None]:
        """Surround a forward on these rows of the batch."""
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


class RowDropout(DropoutLayer):
    """The layer that `row_dropout` puts in the place of a dropout layer."""

    def __init__(self, stock: Any, masks: Masks, *, number: int, name: str) -> None:
        super().__init__(stock.p, stock.inplace)
        self.is_feature, self.is_alpha = type(stock) in _FEATURE, type(stock) in _ALPHA_KINDS
        self.masks = masks
        self.number = number
        self.name = name
        self.training = stock.training

    def forward(self, x: Tensor) -> Tensor:
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
        """Return the number of the update, for `state_dict`. It is no buffer, which DDP would broadcast at each forward."""
        return torch.tensor(self.masks.update)

    def set_extra_state(self, state: Tensor) -> None:
        self.masks.update = int(state)

    @disable_dynamo  # compiled, it would be compiled again for the number of every update
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
        key = key_of(self.masks.seed, self.masks.update, self.number, call)
        keep = keep_mask(key, rows.on(x.device), shape if per_row == 1 else (per_row, *shape), 1 - self.p)
        return keep.reshape(x.shape[0], *shape, *[1] * (x.dim() - 1 - len(shape)))

    def _rows(self) -> tuple[RowsNow, int]:
        """Return the rows that are running, and the number of earlier calls of this layer for them."""
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
    """Return the state that the replaced layers of `model` share; None if there are none."""
    return next((module.masks for module in model.modules() if isinstance(module, RowDropout)), None)


def rows_running(model: nn.Module, row_numbers: Iterable[int]) -> AbstractContextManager[None]:
    """Surround a forward of `model` on these rows of the batch."""
    masks = masks_of(model)
    devices = {parameter.device for parameter in model.parameters()}
    return nullcontext() if masks is None else masks.at(tuple(row_numbers), devices)


def count_update(model: nn.Module) -> None:
    """Begin a batch, for a model with replaced layers."""
    if (masks := masks_of(model)) is not None:
        masks.begin()


@dataclass(frozen=True)
class NumberedRows(PassHook):
    """Hook that gives each micro-batch the numbers of its rows in the whole batch."""

    masks: Masks
    row_numbers: tuple[tuple[int, ...], ...]
    devices: set[torch.device]

    def around_forward(self, micro_batch: int) -> AbstractContextManager[object]:
        return self.masks.at(self.row_numbers[micro_batch], self.devices)

    def for_lent(self, lent: Batch) -> "NumberedRows":
        return replace(self, row_numbers=(tuple(range(num_rows(lent))),))


def number_rows(masks: Masks, model: nn.Module, cut: MicroBatches, batch: Batch, ranks: Ranks) -> NumberedRows:
    """Return the hook for a batch that is split by `cut`.

    Without a `Dealt` batch the rows of the ranks follow one another, which takes a small collective. The stand-in of a rank
    without rows counts for nothing and may have any numbers.
    """
    own = [row for rows in cut.row_numbers for row in rows]
    if isinstance(batch, Dealt) and not batch.is_stand_in:
        numbers: Sequence[int] = batch.row_numbers
    else:
        counts = [] if isinstance(batch, Dealt) else ranks.gather([len(own)])[: ranks.rank]
        offset = int(sum(count for (count,) in counts))
        numbers = range(offset, offset + len(own))
    placed = [tuple(numbers[row] for row in rows) for rows in cut.row_numbers]
    parts = tuple(rows or tuple(range(num_rows(part))) for rows, part in zip(placed, cut, strict=True))
    return NumberedRows(masks, parts, {parameter.device for parameter in model.parameters()})


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)


class DrawFinder(TorchFunctionMode):
    """Function mode that finds the first torch function that draws random numbers. It is slow."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self.found: str | None = None
        """The function and its caller; None if there was none."""

    @disable_dynamo
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = random_state(self._devices) if self.found is None else None
        result = func(*args, **(kwargs or {}))
        if before is not None and not before.is_now():
            self.found = f"{getattr(func, '__name__', func)} {_caller()}"
        return result


def _caller() -> str:
    """Name the innermost line outside torch and this package."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((_TORCH, _OWN)):
            return f"in {frame.name}, {Path(frame.filename).name}:{frame.lineno}"
    return "somewhere in torch"


_WORD = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: the increment of splitmix64."""


def key_of(*numbers: int) -> int:
    """Hash whole numbers, in this order, to 64 bits."""
    key = 0
    for number in numbers:
        key = (key ^ number) + _STEP & _WORD
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _WORD
        key ^= key >> 31
    return key


def keep_mask(key: int, row_numbers: Tensor, shape: Sequence[int], keep: float) -> Tensor:
    """Draw True with probability `keep`, to 32 bits, for each of `shape` entries of each row.

    An entry depends on the key, its row's number and its place in the row, not on the number of rows or their padding.
    """
    if keep <= 0 or keep >= 1:
        return torch.full((len(row_numbers), *shape), keep >= 1, device=row_numbers.device)
    bits, second = (_scrambled(row_numbers, key_of(key, half)).reshape(-1, *[1] * len(shape)) for half in (0, 1))
    for dim, size in enumerate(shape):  # sums of one random number per coordinate distinguish places
        along = _scrambled(torch.arange(size, device=row_numbers.device), key_of(dim))
        bits = bits + along.reshape(-1, *[1] * (len(shape) - 1 - dim))
    # lowbias32, a 32-bit hash of few operations; the second key makes it one of 64 bits by row
    spare = torch.empty_like(bits)
    _fold(bits, 16, spare).mul_(0x7FEB352D).bitwise_xor_(second)
    _fold(bits, 15, spare).mul_(_signed(0x846CA68B))
    _fold(bits, 16, spare)
    return bits < _signed(round(keep * 2**32) + 2**31)


def _scrambled(numbers: Tensor, key: int) -> Tensor:
    """Return 32 bits of splitmix64 of each number."""
    bits = numbers.to(torch.int64) * _signed(_STEP, 64) + _signed(key, 64)
    bits = (bits ^ (bits >> 30 & 2**34 - 1)) * _signed(0xBF58476D1CE4E5B9, 64)
    bits = (bits ^ (bits >> 27 & 2**37 - 1)) * _signed(0x94D049BB133111EB, 64)
    return (bits >> 32).to(torch.int32)


def _fold(bits: Tensor, shift: int, spare: Tensor) -> Tensor:
    """Compute bits ^= bits >> shift in place, with an unsigned shift."""
    torch.bitwise_right_shift(bits, shift, out=spare)
    return bits.bitwise_xor_(spare.bitwise_and_(2 ** (32 - shift) - 1))


def _signed(number: int, width: int = 32) -> int:
    """Read these bits in two's complement."""
    number &= 2**width - 1
    return number - 2**width if number >= 2 ** (width - 1) else number
