"""What a self-test found."""

from dataclasses import dataclass
from typing import Literal

Group = Literal["exactness", "memory", "speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One claim, measured on this device."""

    group: Group
    name: str
    found: str
    """The number that was measured, with its unit; or the first line of what was raised."""
    wanted: str
    """What it has to be; where this is empty, the number is told and judges nothing."""
    has_passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """All claims, and where they were measured."""

    device: str
    """As people call it: "NVIDIA A100-SXM4-40GB (cuda:0)"."""
    versions: dict[str, str]
    seconds: float
    checks: tuple[Checked, ...]

    @property
    def has_passed(self) -> bool:
        """True if every check has."""
        return all(check.has_passed for check in self.checks)
