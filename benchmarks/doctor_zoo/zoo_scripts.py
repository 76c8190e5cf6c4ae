"""Scripts kept many to a file: `=== wrong/name [launch]`, `why:`, `allow:`, the code with `# <- kind` where it may be named."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from anybatch.doctor import Diagnosis

HERE = Path(__file__).parent
FILES = ("first_wrong", "first_right", "second", "frameworks", "third")
MARK = re.compile(r"# <- (\S+)")
FRAMEWORKS = re.compile(r"^(?:from|import) (accelerate|lightning|transformers|deepspeed|trl)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooScript:
    """One script, and what is true of it besides what it is marked with."""

    group: str
    """wrong or right."""
    name: str
    launch: str
    why: str
    allowed: frozenset[str]
    code: str

    @property
    def frameworks(self) -> frozenset[str]:
        """That it imports."""
        return frozenset(FRAMEWORKS.findall(self.code))

    @property
    def marks(self) -> frozenset[tuple[str, int]]:
        """The kinds that it is marked with, and their lines."""
        lines = enumerate(self.code.splitlines(), start=1)
        return frozenset((found[1], number) for number, line in lines if (found := MARK.search(line)))

    def write(self, folder: Path) -> Path:
        """As a file of its own."""
        path = folder / f"{self.name}.py"
        path.write_text(self.code)
        return path


def read_scripts(file: str) -> tuple[ZooScript, ...]:
    """Of one of `FILES`."""
    return tuple(_script(section) for section in (HERE / f"{file}.txt").read_text().split("=== ")[1:])


def _script(section: str) -> ZooScript:
    head, *lines = section.rstrip().split("\n")
    named, _, launch = head.partition(" [")
    group, _, name = named.partition("/")
    facts = {"why": "", "allow": ""}
    while lines and lines[0].partition(": ")[0] in facts:
        key, _, facts_value = lines.pop(0).partition(": ")
        facts[key] = facts_value
    return ZooScript(
        group=group,
        name=name,
        launch=launch.rstrip("]"),
        why=facts["why"],
        allowed=frozenset(filter(None, facts["allow"].split(", "))),
        code="\n".join(lines) + "\n",
    )


def faults(script: ZooScript, scripts: Iterable[ZooScript], diagnosis: Diagnosis) -> Iterator[str]:
    """What the doctor missed at its line, or at that of a module among `scripts`, and what it accused wrongly."""
    modules = [one for one in scripts if one.launch == "module" and one.name in script.code]
    marks = script.marks.union(*(module.marks for module in modules))
    planted = {kind for kind, _ in marks}
    at_their_line = {one.kind for one in diagnosis.findings if (one.kind, one.line) in marks}
    yield from (f"{kind} is not named at its line" for kind in sorted(planted - at_their_line))
    for one in diagnosis.findings:
        if one.kind == "recorder-trouble" or (one.severity == "error" and one.kind not in planted | script.allowed):
            yield f"line {one.line} is called {one.kind}: {one.message}"
