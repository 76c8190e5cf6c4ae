"""Which fields of padded batches have an entry per token: as named, as known, or refused."""

from collections.abc import Collection, Sequence

from anybatch.core import Batch
from anybatch.errors import SplitError
from anybatch.ragged.padding import TOKEN_NAMES, PaddedDims, columns_of, name_of, padded_dims


class TokenFields:
    """Only what has an entry per token may be trimmed; being as wide as the padding is no proof of it.

    `named` are fields that the user says are per token, `kept` those that are not. A field that had a width of its own in an
    earlier batch is not per token either: as wide as the padding by chance, it is kept.
    """

    def __init__(self, named: Collection[str] = (), kept: Collection[str] = ()) -> None:
        self.named = frozenset(named)
        self.kept = frozenset(kept)
        self._own_width: set[str] = set()

    def find(
        self, batch: Batch, lengths: Sequence[int], *, width: int, count: int, known: Collection[str] = ()
    ) -> PaddedDims:
        """What is trimmed of a batch padded to `width`: fields named, those at the paths `known`, and tokenizers' own."""
        wide = padded_dims(batch, width=width, count=count, keep=self.kept)
        self._own_width |= {path for path, _ in columns_of(batch, count, self.kept) if path not in wide}
        self._check_named(wide, width)
        found = {}
        for path, dims in wide.items():
            name = name_of(path)
            if name in self.named or path in known or name in TOKEN_NAMES or "attention" in name:
                found[path] = dims
            elif path not in self._own_width and min(lengths) < width:
                raise SplitError(
                    f"batch{path} is {width} wide, as the padding of this batch is, and nothing says whether it has an entry "
                    "per token: trimming it with the padding may cut off what counts. Name it in "
                    f"Tokens(per_token=[{name!r}]) if it has, or in Tokens(keep=[{name!r}]) if it has not."
                )
        return found

    def _check_named(self, wide: PaddedDims, width: int) -> None:
        missing = self.named - {name_of(path) for path in wide}
        if missing:
            raise SplitError(
                f"Tokens(per_token=...) names {min(missing)!r}, and the batch has no such field whose dim 1 is {width} wide, "
                "as its padding is. Give a field per token its rows in dim 0 and its tokens in dim 1, or leave the name out."
            )
