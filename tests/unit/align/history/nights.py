"""Made-up nights: findings, results and a runner that starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from align.history.changes import Found
from align.history.night import Ended
from align.history.plan import Plan, PlannedCase
from align.result.schema import Result
from align.walk.paired import Fault

NORM = Fault("B", "operator", "candidate", "layers.2.mlp_norm")
DEEPER = Fault("B", "operator", "candidate", "layers.3.mlp_norm")
SLOT = Fault("A", "slots", "candidate", "layers.0.attn.k_cache", "foreign_block")


def found(fault: Fault, number: float = 1.0) -> Found:
    return Found(fault, f"Path {fault.path}: {fault.kind} at {fault.checkpoint}, {number} roundings.")


def result(*faults: Fault, verdict: str = "", reason: str = "", number: float = 1.0) -> Result:
    """Of a run with these findings; the indices' kind stands in the evidence, where results have it."""
    findings = [
        {
            "path": one.path,
            "kind": one.kind,
            "side": one.side,
            "checkpoint": one.checkpoint,
            "evidence": {"fault": one.fault} if one.fault else {},
            "summary": found(one, number).summary,
        }
        for one in faults
    ]
    plain: dict[str, Any] = {
        "source": "run",
        "verdict": verdict or ("diverged" if faults else "aligned"),
        "reason": reason,
        "engines": {"candidate": "lmdeploy", "reference": "vllm"},
        "facts": [],
        "findings": findings,
        "scope": {},
        "conditions": [],
        "stability": [],
        "weights": {},
        "measures": [],
        "walk": [],
        "versions": {"align": {"align": "1"}},
        "command": ["align", "run"],
    }
    return Result.model_validate(plain)


def plan_of(*names: str, directory: Path = Path("."), keep: int = 7) -> Plan:
    cases = tuple(PlannedCase(name, "qwen3", "tp1", "bfloat16") for name in names)
    return Plan("nightly", directory, cases, 30.0, keep)


class Runner:
    """Gives each case the result that was made for it; ``stops`` after so many, as a kill would."""

    def __init__(self, results: Mapping[str, Result | str], stops: int = 1 << 30) -> None:
        self.results, self.left = results, stops
        self.ran: list[str] = []
        self.places: list[Path] = []

    def __call__(self, case: PlannedCase, directory: Path) -> Ended:
        directory.mkdir(parents=True)
        self.places.append(directory)
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        self.ran.append(case.name)
        one = self.results[case.name]
        return Ended(directory, None, one, 1.0) if isinstance(one, str) else Ended(directory, one, "", 1.0)


def states(changed: Sequence[Any]) -> list[str]:
    return [one.state for one in changed]
