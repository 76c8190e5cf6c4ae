"""Copies that take none of the memory that is short."""

import gc
import warnings

import torch
from torch._subclasses import FakeTensorMode

from anybatch.core.snapshot import TensorFile, spilled_copy


def test_a_copy_on_the_cpu_goes_to_disk_and_comes_back():
    spool = TensorFile()
    for tensor in (torch.randn(3, 5, dtype=torch.bfloat16).T, torch.tensor(3.5), torch.tensor([True, False])):
        was, written = tensor.clone(), spool.num_bytes
        read = spilled_copy(tensor, spool)
        tensor.zero_()
        assert torch.equal(read(), was)
        assert spool.num_bytes == written + tensor.nbytes


def test_tensors_without_numbers_are_not_copied():
    spool = TensorFile()
    with FakeTensorMode():
        fake = torch.empty(4)
    assert spilled_copy(fake, spool)() is fake
    assert spool.num_bytes == 0


def test_a_file_in_a_cycle_is_closed_with_it_and_nobody_is_warned():
    spool = TensorFile()
    spool.write(torch.zeros(8))
    file = spool._file
    spool.cycle = [spool, file]  # type: ignore[attr-defined]
    gc.collect()
    assert not file.closed
    del spool
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    assert file.closed
