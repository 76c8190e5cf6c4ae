"""The pytest fixture: `pytest_plugins = ["anybatch.doctor.doctor_fixture"]`, then `def test_loop(doctor): ...`."""

from collections.abc import Iterator

import pytest

from anybatch.doctor.watching import Doctor


@pytest.fixture
def doctor() -> Iterator[Doctor]:
    """Watches the test; it fails at its end where the doctor found an error."""
    with Doctor() as watching:
        yield watching
    watching.check()
