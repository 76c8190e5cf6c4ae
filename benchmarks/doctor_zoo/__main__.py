"""Every script of the zoo that others wrote, run under watch and judged; a line for each file of scripts.

python -m benchmarks.doctor_zoo [first_wrong | part of a script's name ...]
python -m benchmarks.doctor_zoo --store    # their logs, made small, beside those that are stored: for the tests
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from anybatch.doctor import judge_folder
from benchmarks.doctor_zoo.stored_logs import StoredLogs, small_logs, store
from benchmarks.doctor_zoo.watched_forks import watch_forked
from benchmarks.doctor_zoo.zoo_scripts import FILES, ZooScript, faults, read_scripts


def main() -> None:
    """Print what is missed and what is accused wrongly, then the counts."""
    words = [word for word in sys.argv[1:] if word != "--store"]
    stored: dict[str, StoredLogs] = {}
    for file in FILES:
        found = [script for script in read_scripts(file) if _is_asked(script, file, words)]
        if not found:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            alone = [script for script in found if not script.launch.startswith("torchrun")]
            for failure in watch_forked(alone, folder):
                print(failure)
            for script in found:
                if script not in alone:
                    _launch(script, folder)
            judged = [script for script in found if script.launch != "module"]
            bad = sum(_judge(script, found, folder) for script in judged)
            stored |= {script.name: small_logs(folder / script.name) for script in judged}
        groups = {group: sum(script.group == group for script in judged) for group in ("wrong", "right")}
        print(f"{file:<12} {groups['wrong']:3} wrong, {groups['right']:3} right: {bad} judged otherwise than marked")
    if "--store" in sys.argv:
        store(stored)


def _is_asked(script: ZooScript, file: str, words: list[str]) -> bool:
    return not words or file in words or any(word in script.name for word in words)


def _judge(script: ZooScript, scripts: list[ZooScript], folder: Path) -> bool:
    """True where something is wrong with the verdict, which is printed."""
    wrong = list(faults(script, scripts, judge_folder(folder / script.name)))
    for fault in wrong:
        print(f"{script.group}/{script.name}: {fault}")
    return bool(wrong)


def _launch(script: ZooScript, folder: Path) -> None:
    path, ranks = script.write(folder), script.launch.split()[1]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, str(path)]
    command = [
        sys.executable,
        "-m",
        "anybatch",
        "doctor",
        "--log",
        str(folder / script.name),
        "--json",
        "--",
        sys.executable,
    ]
    subprocess.run([*command, *words], capture_output=True, check=False)


if __name__ == "__main__":
    main()
