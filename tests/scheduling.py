"""Which tests run in which worker of `make test`, and in which order.

A file is a unit: its fixtures, its pages in a browser and its ranks are made once. Files whose tests are long and share nothing
are cut into single tests, and the tasks on ranks by task. What takes long comes first, so that all workers end together.

There is one worker to a core. A worker waits for half of its time, for processes that it has started, for a browser, for
ranks; yet four workers on two cores took 13 min 29 s where two took 10 min 51 s (16 November 2026).

`--dist loadgroup` would do the same by marks, but pytest 9.2 ignores what xdist 3.8 writes into the names of tests, and marks
no longer group (pytest-xdist issue 1386): every spawn was done in both workers.
"""

import re

SINGLE = {
    "tests/app/cli/test_kill_resume.py",
    "tests/app/cli/test_torchrun.py",
    "tests/house/test_lint.py",
    "tests/integrations/test_launchers.py",
    "tests/integrations/test_ray.py",
    "tests/memory/test_real_limit.py",
    "tests/test_benchmarks.py",
}
"""Long tests that share nothing."""
LONG = [
    "tests/integrations/test_ray.py",
    "tests/integrations/test_launchers.py",
    "tests/integrations/",
    "tests/test_examples.py",
    "tests/app/cli/test_torchrun.py",
    "tests/app/training/test_ranks.py",
    "tests/app/report/test_page.py",
    "tests/app/lessons/test_learn_page.py",
    "tests/app/lessons/test_engine.py",
    "tests/app/cli/test_kill_resume.py",
    "tests/house/test_lint.py",
    "tests/dropout/test_row_dropout.py",
    "tests/app/cli/test_train_command.py",
    "tests/memory/test_real_limit.py",
    "tests/test_benchmarks.py",
    "tests/test_site.py",
    "tests/doctor/test_doctor_command.py",
    "tests/test_install.py",
    "tests/core/test_out_of_memory.py",
    "tests/parallel/",
    "tests/benchmarks/test_table.py",
    "tests/memory/",
    "tests/app/training/",
    "tests/verification/",
    "tests/core/",
    "tests/accelerator/",
]
"""The longest first; what is not listed comes last."""


def unit(test: str) -> str:
    """Tests of one unit run one after the other in one worker."""
    file = test.split("::")[0]
    if file in SINGLE:
        return test
    if file.startswith("tests/integrations/"):
        return "tests/integrations/"  # transformers takes longer to load than most tests
    if file == "tests/app/training/test_ranks.py":
        found = re.search(r"\[(stdlib|pairs|digits)\b", test)
        return f"{file}, {found[1] if found else 'textbook'}"
    return file


def turn(test: str) -> int:
    """Tests run by ascending turn."""
    return next((number for number, start in enumerate(LONG) if test.startswith(start)), len(LONG))


def is_long(test: str) -> bool:
    """Left out by `make quick`: the files in LONG, not its folders, which are there for the order."""
    return test.split("::")[0] in LONG and not test.startswith("tests/house/")


def scheduler(config: object, log: object) -> object:
    """Hands whole units to workers, in the order in which they were collected; pytest-xdist is loaded where it runs."""
    from xdist.scheduler import LoadScopeScheduling

    by_unit = LoadScopeScheduling(config, log)
    by_unit._split_scope = unit
    return by_unit
