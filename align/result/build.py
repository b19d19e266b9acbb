"""From what a comparison found out to its result."""

from __future__ import annotations

import hashlib
import json
import platform
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from align.case.schema import Case
from align.findings import Finding
from align.models.info import ModelInfo
from align.result.facts import NO_ANSWERS, Answers, facts_of
from align.result.ground import Ground
from align.result.measures import measures_of
from align.result.plain import plain, without_directory
from align.result.schema import CaseSummary, Environment, RequestSummary, Result, Timing
from align.result.scope import scope_of
from align.result.symptom import symptom_of
from align.result.tensors import coverage_of, tensors_of
from align.result.tokens import tokens_of
from align.result.walk import walk_of
from align.result.walked import walked_of
from align.run.report import Report
from align.run.stability import Stability
from envs.home import REPOSITORY

_DISTRIBUTION = "align-harness"


@dataclass(frozen=True)
class Command:
    """The command that found it.

    Attributes:
        argv: as it was typed.
        started: ISO 8601.
        directory: the run's; ``None`` if there is none.
        next: what to do now.
        tensors: whether tensors were to be compared.
        traces: by side, what was compared.
    """

    argv: Sequence[str] = ()
    started: str | None = None
    directory: Path | None = None
    next: str = ""
    tensors: bool = True
    traces: Mapping[str, str] | None = None


def result_of(
    report: Report,
    ground: Ground,
    command: Command,
    answers: Answers = NO_ANSWERS,
    details: Mapping[str, Any] | None = None,
) -> Result:
    """The result, of a comparison that ended anyhow."""
    tokens, coverage, tensors = (
        tokens_of(report.comparisons, ground.free, ground.replay),
        coverage_of(report),
        tensors_of(report),
    )
    found = {
        "source": ground.source,
        "verdict": report.verdict,
        "reason": report.reason,
        "reason_told": report.reason_told,
        "next": command.next,
        "remarks": list(report.remarks),
        "simulated": ground.simulated,
        "engines": dict(ground.engines),
        "case": None if ground.case is None else _case(ground.case, ground.info),
        "facts": [one.model_dump() for one in facts_of(report, ground, answers)],
        "symptom": symptom_of(report, ground).model_dump(),
        "findings": [_finding(one) for one in report.findings],
        **walked_of(report),
        "transplants": [one.to_dict() for one in report.transplants],
        "scope": scope_of(report).model_dump(),
        "tokens": None if tokens is None else tokens.model_dump(),
        "conditions": [one.to_dict() for one in report.conditions],
        "stability": [_stability(one) for one in report.stability],
        "coverage": None if coverage is None else coverage.model_dump(),
        "surplus": dict(report.surplus),
        "tensors": None if tensors is None else tensors.model_dump(),
        "weights": {side: _audit(records) for side, records in ground.audits.items()},
        "ledger": {side: one.to_dict() for side, one in report.ledgers.items()},
        "collectives": {side: one.to_dict() for side, one in report.collectives.items()},
        "arguments": {side: one.to_dict() for side, one in report.arguments.items()},
        "arguments_beside": [one.to_dict() for one in report.beside],
        "recordings": {side: one.to_dict() for side, one in report.recordings.items()},
        "measures": [one.model_dump() for one in measures_of(ground.extras)],
        "walk": [one.model_dump() for one in walk_of(report, ground, command.tensors)],
        "versions": {"align": program_versions(), **ground.versions},
        "command": repeatable(command.argv),
        "details": None if details is None else dict(details),
    }
    own = {
        "timing": Timing(
            started=command.started, seconds={stage: round(seconds, 3) for stage, seconds in report.seconds.items()}
        ).model_dump(),
        "environment": Environment(
            directory=None if command.directory is None else str(command.directory),
            argv=list(command.argv),
            model_path=None if ground.info is None else str(ground.info.path),
            traces=dict(command.traces or {}),
            patches={side: list(extras.patches) for side, extras in ground.extras.items() if extras.patches},
            pythons=dict(ground.pythons),
            pids={side: list(pids) for side, pids in ground.pids.items()},
            bytes=dict(report.bytes),
        ).model_dump(),
    }
    return Result.model_validate({**without_directory(plain(found), command.directory), **own})


def repeatable(argv: Sequence[str]) -> list[str]:
    """The command that says the same anywhere: by its name, without where this one run goes."""
    found: list[str] = []
    skip = False
    for index, word in enumerate(argv):
        if skip:
            skip = False
        elif index == 0:
            found.append("align")
        elif word == "--out":
            skip = True
        elif not word.startswith("--out="):
            found.append(word)
    return found


def program_versions() -> dict[str, str]:
    """This program and its Python. A checkout that is not installed says what its project file says."""
    try:
        version = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        try:
            version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
        except (OSError, ValueError, KeyError):
            version = "unknown"
    return {"align": str(version), "python": platform.python_version()}


def _case(case: Case, info: ModelInfo | None) -> dict[str, Any]:
    whole = json.dumps(case.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return CaseSummary(
        model=case.model if info is None else info.name,
        fingerprint="" if info is None else info.fingerprint,
        sha256=hashlib.sha256(whole.encode()).hexdigest(),
        dtype=case.dtype,
        layout=str(case.layout.to_layout()),
        reference_layout=None if case.reference_layout is None else str(case.reference_layout.to_layout()),
        max_new_tokens=case.decoding.max_new_tokens,
        block_size=case.batch.block_size,
        numerics=case.numerics.model_dump(),
        requests=[RequestSummary(name=one.name, prompt_tokens=len(one.token_ids)) for one in case.requests],
    ).model_dump()


def _finding(finding: Finding) -> dict[str, Any]:
    return finding.to_dict()


def _stability(one: Stability) -> dict[str, Any]:
    first = one.to_dict()["unstable"]
    return {"side": one.side, "stable": one.stable, "tokens": one.tokens, "noise": one.noise, "first": first}


def _audit(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    states = [record.get("status") for record in records]
    hidden = {str(record.get("parameter")): None for record in records if record.get("status") == "not observable"}
    return {"equal": states.count("equal"), "differs": states.count("differs"), "not_observable": list(hidden)}
