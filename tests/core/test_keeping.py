"""Copies that take none of the memory that is short, and what limits leave of it."""

import gc
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from anybatch.core.out_of_memory import left_within_limits
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


MIB = 2**20


def group(folder, limit, used, cache=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_the_tightest_group_counts_and_its_page_cache_does_not(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/slice/job\n")
    assert left_within_limits(proc, groups) is None
    group(groups / "slice" / "job", "max", 10 * MIB)
    assert left_within_limits(proc, groups) is None
    group(groups / "slice", 100 * MIB, 60 * MIB, cache=20 * MIB)
    assert left_within_limits(proc, groups) == 60 * MIB
    group(groups / "slice" / "job", 30 * MIB, 40 * MIB)
    assert left_within_limits(proc, groups) == 0


def test_version_1_of_control_groups_is_read_too(tmp_path):
    proc, folder = tmp_path / "proc", tmp_path / "groups" / "memory" / "job"
    proc.mkdir()
    folder.mkdir(parents=True)
    (proc / "cgroup").write_text("4:cpu:/job\n3:memory:/job\n")
    (folder / "memory.usage_in_bytes").write_text("10")
    (folder / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert left_within_limits(proc, tmp_path / "groups") is None
    (folder / "memory.limit_in_bytes").write_text("110")
    assert left_within_limits(proc, tmp_path / "groups") == 100


def test_a_limit_of_the_process_counts():
    pytest.importorskip("resource", reason="the system has no limits of this kind")
    code = (
        "import resource; from pathlib import Path; from anybatch.core.out_of_memory import left_within_limits;"
        "resource.setrlimit(resource.RLIMIT_DATA, (2**40, resource.RLIM_INFINITY));"
        "print(2**40 - left_within_limits(groups=Path('nowhere')))"
    )
    taken = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < taken < 2**34
