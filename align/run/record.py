"""What a run leaves on disk about its sides and tokens, as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from align.case.schema import Case
from align.compare.tokens import TokenComparison
from align.models.info import ModelInfo
from align.run.session import Outcome, SideOutcome


def side_record(side: SideOutcome) -> dict[str, Any]:
    """One side: what ran, what was read back, how long it took."""
    return {
        "engine": side.engine,
        "launched": None if side.launched is None else asdict(side.launched),
        "observed": [asdict(observation) for observation in side.observations],
        "seconds": {
            name: result.seconds
            for name, result in (("free", side.free), ("replay", side.replay))
            if result is not None
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


def run_record(
    case: Case,
    info: ModelInfo,
    outcome: Outcome,
    comparisons: dict[str, TokenComparison],
    verdict: str,
    command: list[str],
) -> dict[str, Any]:
    """The run as one object; everything but times is the same when the same case runs again."""
    return {
        "verdict": verdict,
        "model": {"name": info.name, "path": str(info.path), "fingerprint": info.fingerprint},
        "case": case.model_dump(mode="json"),
        "sides": {role: side_record(side) for role, side in outcome.sides.items()},
        "comparisons": {name: comparison.to_dict() for name, comparison in comparisons.items()},
        "command": command,
    }
