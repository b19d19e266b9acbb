"""From broken rules to findings of path FA, and how they stand to what the comparison of numbers found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from align.attention.audit import Audited, Group
from align.findings import Finding, told
from align.sentences import Said, in_both, said

#: Paths whose findings an argument may cause; wrong inputs and weights it does not.
_CAUSED = ("A", "B", "C", "UNLOCATED")
_NOT_CAUSED = ("weights", "configuration", "host fallback")


def argument_findings(audits: Mapping[str, Audited]) -> list[Finding]:
    """One finding per side, rule, operator and phase that is an ERROR, the first in time first."""
    found = [(one, side) for side, audit in audits.items() for one in audit.errors]
    found.sort(key=lambda pair: (pair[0].first.run, pair[0].first.step, pair[0].layer))
    return [_finding(one, side) for one, side in found]


def _finding(group: Group, side: str) -> Finding:
    what = said(
        "fa.finding",
        operator=group.operator,
        what=in_both(group.said),
        rule=group.rule,
        layer=group.layer,
        layers=len(group.layers),
        calls=group.calls,
    )
    return Finding(
        "FA",
        "arguments",
        side=side,
        layer=group.layer,
        phase=group.phase,
        step=group.first.step,
        ranks=group.ranks,
        evidence={
            **told(what),
            "rule": group.rule,
            "severity": group.severity,
            "operator": group.operator,
            "layer": group.layer,
            "step": group.first.step,
            "layers": list(group.layers),
            "run": group.first.run,
            "rank": group.first.rank,
            "steps_total": group.steps,
            "calls_total": group.calls,
            "message": dict(group.said),
            "site": list(group.at),
            "arguments": dict(group.arguments),
        },
        next=f"read the call at {group.at[0]}, and `align fa rules {group.rule}`"
        if group.at
        else f"align fa rules {group.rule} says what the operator takes",
    )


def with_arguments(findings: Sequence[Finding], audits: Mapping[str, Audited]) -> tuple[Finding, ...]:
    """All findings: what was found keeps its place and verdict, and says which wrong argument is its likely cause.

    Findings of arguments come behind it, but before what is not located.
    """
    own = argument_findings(audits)
    if not own:
        return tuple(findings)
    kept = [_with_cause(one, own) for one in findings]
    place = next((at for at, one in enumerate(kept) if one.path == "UNLOCATED"), len(kept))
    return (*kept[:place], *own, *kept[place:])


def _with_cause(finding: Finding, own: Sequence[Finding]) -> Finding:
    """Told with the arguments that are wrong at or before its place on the same side."""
    if finding.path not in _CAUSED or finding.kind in _NOT_CAUSED:
        return finding
    before = [one for one in own if _before(one, finding)]
    if not before:
        return finding
    likely: Said = said("fa.likely", calls=[_short(one) for one in before[:3]], count=len(before))
    rules = list(dict.fromkeys(one.evidence["rule"] for one in before))
    return replace(finding, evidence={**finding.evidence, "likely": likely, "likely_rules": rules})


def _before(argument: Finding, finding: Finding) -> bool:
    if finding.side not in (None, argument.side) or finding.checkpoint == "embed":
        return False
    assert argument.layer is not None
    if finding.phase is not None and argument.phase not in (finding.phase, "mixed") and finding.phase != "mixed":
        return finding.phase == "decode" and argument.layer <= _layer(finding)  # prefill writes what decode reads
    return argument.layer <= _layer(finding)


def _layer(finding: Finding) -> float:
    return float("inf") if finding.layer is None else finding.layer


def _short(finding: Finding) -> dict[str, Any]:
    evidence = finding.evidence
    return said(
        "fa.call", operator=evidence["operator"], layer=finding.layer, phase=finding.phase, rule=evidence["rule"]
    )
