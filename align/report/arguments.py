"""The arguments of attention and cache operators in the report: broken rules in one table, and a pair of calls of each
phase beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from align.result.arguments import ArgumentRule, ArgumentsBeside
from align.result.parts import Finding
from align.result.schema import Result

#: Rows of the table; the result has all.
ROWS = 24
_PHASES = ("prefill", "decode")


def seen(result: Result) -> bool:
    """Whether any side's calls were recorded; if not, the report says so among what was not checked."""
    return any(audit.observable for audit in result.arguments.values())


def rules(result: Result) -> list[tuple[str, ArgumentRule]]:
    """``(side, rule)``, the worst first."""
    return _all(result)[:ROWS]


def more(result: Result) -> int:
    """How many the table leaves out."""
    return max(0, len(_all(result)) - ROWS)


def _all(result: Result) -> list[tuple[str, ArgumentRule]]:
    order = ("ERROR", "WARN", "REMIND", "INFO")
    found = [(side, one) for side, audit in result.arguments.items() for one in audit.groups]
    return sorted(found, key=lambda pair: order.index(pair[1].severity))


def shown(result: Result) -> list[ArgumentsBeside]:
    """One pair of calls of each phase: of the first layers that have a difference, or else of the first."""
    chosen = []
    for phase in _PHASES:
        pairs = [one for one in result.arguments_beside if one.phase == phase]
        differing = (one for one in pairs if any(row.verdict == "different" for row in one.rows))
        chosen += [next(differing, pairs[0])] if pairs else []
    return chosen


def ranges(numbers: Sequence[int]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def given(finding: Finding) -> list[str]:
    """The arguments of the call that a finding is about, ``name value`` each."""
    return [f"{name} {value}" for name, value in finding.evidence.get("arguments", {}).items()]
