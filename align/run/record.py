"""What a run leaves on disk about its sides and tokens, as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from align.case.schema import Case
from align.models.info import ModelInfo
from align.run.outcome import Outcome, SideOutcome
from align.run.report import Report
from align.run.together import together


def side_record(side: SideOutcome) -> dict[str, Any]:
    """One side: what was asked for, what ran, what was read back, what was recorded, how long it took."""
    return {
        "engine": side.engine,
        "spec": None if side.spec is None else asdict(side.spec),
        "launched": None if side.launched is None else asdict(side.launched),
        "observed": [asdict(observation) for observation in side.observations],
        "captures": [asdict(capture) for capture in side.captures],
        "seconds": {
            name: result.seconds
            for name, result in (("free", side.free), ("again", side.again), ("replay", side.replay))
            if result is not None
        },
        "together": {
            name: found.to_dict()
            for name, result in (("free", side.free), ("replay", side.replay))
            if result is not None and (found := together(result)) is not None
        },
    }


def tokens_record(outcome: Outcome) -> dict[str, Any]:
    """Every token of every request and side, with its top logprobs, and the steps that computed it."""
    record: dict[str, Any] = {}
    for role, side in outcome.sides.items():
        for name, result in (("free", side.free), ("replay", side.replay)):
            if result is not None:
                record.setdefault(name, {})[role] = {
                    "generations": [asdict(generation) for generation in result.generations],
                    "steps": [asdict(step) for step in result.steps],
                }
    return record


def report_record(report: Report) -> dict[str, Any]:
    """What was found out; a joint run and the comparison of its traces say the same."""
    return {
        "verdict": report.verdict,
        "reason": report.reason,
        "allowed": [condition.name for condition in report.tainted],
        "findings": [finding.to_dict() for finding in report.findings],
        "transplants": [one.to_dict() for one in report.transplants],
        "conditions": [condition.to_dict() for condition in report.conditions],
        "stability": [one.to_dict() for one in report.stability],
        "comparisons": {name: comparison.to_dict() for name, comparison in report.comparisons.items()},
        "min_coverage": report.min_coverage,
        "tensors": None if report.tensors is None else report.tensors.to_dict(),
        "surplus": dict(report.surplus),
        "ledger": {side: one.to_dict() for side, one in report.ledgers.items()},
        "collectives": {side: one.to_dict() for side, one in report.collectives.items()},
        "remarks": list(report.remarks),
        "bytes": dict(report.bytes),
    }


def run_record(case: Case, info: ModelInfo, outcome: Outcome, report: Report, command: list[str]) -> dict[str, Any]:
    """The run as one object; everything but times is the same when the same case runs again."""
    return {
        **report_record(report),
        "alone": None if report.alone is None else report.alone.to_dict(),
        "diagnosis": None if report.diagnosis is None else report.diagnosis.to_dict(),
        "model": {"name": info.name, "path": str(info.path), "fingerprint": info.fingerprint},
        "case": case.model_dump(mode="json"),
        "sides": {role: side_record(side) for role, side in outcome.sides.items()},
        "seconds": {stage: round(seconds, 3) for stage, seconds in report.seconds.items()},
        "command": command,
    }
