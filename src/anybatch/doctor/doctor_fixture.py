"""A pytest fixture: `pytest_plugins = ["anybatch.doctor.doctor_fixture"]`, then `def test_loop(doctor): ...`."""

from collections.abc import Iterator

import pytest

from anybatch.doctor.watching import Doctor


@pytest.fixture
def doctor() -> Iterator[Doctor]:
    """Watch the test, and fail it at its end if the doctor found an error."""
    with Doctor() as watching:
        yield watching
    watching.check()
