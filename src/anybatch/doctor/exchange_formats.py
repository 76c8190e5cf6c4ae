"""Findings for other tools: SARIF 2.1.0 and the annotations of GitHub's actions."""

import os
from typing import Any
from urllib.parse import quote

from anybatch.doctor.finding import Finding
from anybatch.doctor.judging import Diagnosis

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(diagnosis: Diagnosis, version: str) -> dict[str, Any]:
    """One run with a rule per kind."""
    kinds = sorted({finding.kind for finding in diagnosis.findings})
    driver = {"name": "anybatch doctor", "version": version, "rules": [{"id": kind} for kind in kinds]}
    results = [_result(finding) for finding in diagnosis.findings]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(finding: Finding) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "level": finding.severity,
        "message": {"text": f"{finding.message}\n\n{finding.fix}".strip()},
    }
    if finding.file:
        place = {
            "artifactLocation": {"uri": quote(_relative(finding.file))},
            "region": {"startLine": max(1, finding.line)},
        }
        result["locations"] = [{"physicalLocation": place}]
    return result


def as_github(diagnosis: Diagnosis) -> str:
    """A line per finding; what would end a command is escaped as GitHub has it."""
    lines = []
    for finding in diagnosis.findings:
        level = {"error": "error", "warning": "warning", "note": "notice"}[finding.severity]
        file = _escaped(_relative(finding.file)).replace(":", "%3A").replace(",", "%2C")
        lines.append(
            f"::{level} file={file},line={max(1, finding.line)},title={finding.kind}::{_escaped(finding.message)}"
        )
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _relative(file: str) -> str:
    relative = os.path.relpath(file)
    return (file if relative.startswith("..") else relative).replace(os.sep, "/")
