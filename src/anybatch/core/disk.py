"""Tensors on disk, for as long as a batch needs them."""

import ctypes
import tempfile
from collections.abc import Callable
from threading import Lock
from typing import BinaryIO
from weakref import finalize

import torch
from torch import Tensor


class TensorFile:
    """A file without a name in the directory for temporary files (TMPDIR), written over from batch to batch.

    To write where something was written before costs a thirtieth of writing to new pages. It takes as much disk as the largest
    batch did, and is gone with this object, or after an error, or when the process ends, however it ends.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._lock = Lock()  # backward has a thread per device
        self.num_bytes = 0
        """Written since the last rewind."""

    def __reduce__(self) -> tuple[type["TensorFile"], tuple[()]]:
        return TensorFile, ()  # a copy has a file of its own

    def write(self, flat: Tensor) -> tuple[int, int]:
        """Append the bytes; where they are, and how many."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            finalize(self, self._file.close)  # and not by __del__: in a cycle, the file would be collected before it
        place = self.num_bytes, flat.nbytes
        self._transfer(self._file.write, flat, self.num_bytes)
        self.num_bytes += flat.nbytes
        return place

    def read(self, offset: int, num_bytes: int) -> Tensor:
        """The bytes written at `offset`, in a new tensor."""
        assert self._file is not None
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        self._transfer(self._file.readinto, flat, offset)  # type: ignore[attr-defined]
        return flat

    def rewind(self) -> None:
        """Forget what was written; the next batch goes over it."""
        self.num_bytes = 0

    def close(self) -> None:
        """Give the disk back."""
        self.num_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _transfer(self, move: Callable[[memoryview], int], flat: Tensor, offset: int) -> None:
        """Every byte of `flat`, to or from the file: the system may move fewer at a time."""
        assert self._file is not None
        view = memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")
        with self._lock:
            self._file.seek(offset)
            while view:
                moved = move(view)
                if not moved:
                    raise OSError(
                        f"the file of offloaded tensors ends {len(view)} bytes early, in {tempfile.gettempdir()}."
                    )
                view = view[moved:]
