"""What `anybatch self-test` runs on somebody's device: exactness, memory, speed, each a check with its number."""

from anybatch.selftest.self_testing import Checked, SelfTest, run_self_test

__all__ = ["Checked", "SelfTest", "run_self_test"]
