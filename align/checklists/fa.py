"""What the run knows of the arguments that attention was handed: the one door through which the items get it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from align.result.schema import Result


@dataclass(frozen=True)
class FaCalls:
    """Calls of one side that are alike in what was judged of them.

    Attributes:
        side: ``candidate`` or ``reference``.
        phase: ``prefill``, ``decode`` or ``mixed``, as the step says.
        count: how many, over all layers, steps and ranks.
        judged: ids of the rules of :mod:`align.fa` that were evaluated on them, whatever came of it.
        unseen: ids of rules that are about such calls, and whose facts were not recorded.
    """

    side: str
    phase: str
    count: int
    judged: frozenset[str]
    unseen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FaFacts:
    """Attention's calls of a run.

    Attributes:
        calls: of both sides.
        wrong: id of a rule that an ERROR was raised by → numbers of the result's findings that say so, from 1.
        warned: id of a rule that a WARN was raised by → on how many calls.
    """

    calls: tuple[FaCalls, ...]
    wrong: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    warned: Mapping[str, int] = field(default_factory=dict)


def fa_facts(result: Result) -> FaFacts | None:
    """Attention's calls of a run; ``None`` where those of no side were recorded."""
    audits = {side: audit for side, audit in result.arguments.items() if audit.observable}
    if not audits:
        return None
    calls = tuple(
        FaCalls(side, one.phase, one.calls, frozenset(one.rules), frozenset(one.unseen))
        for side, audit in audits.items()
        for one in audit.looked
    )
    wrong: dict[str, list[int]] = {}
    for number, finding in enumerate(result.findings, 1):
        if finding.path == "FA" and "rule" in finding.evidence:
            wrong.setdefault(str(finding.evidence["rule"]), []).append(number)
    warned: Counter[str] = Counter()
    for audit in audits.values():
        warned.update({one.rule: one.calls for one in audit.groups if one.severity == "WARN"})
    return FaFacts(calls, {rule: tuple(numbers) for rule, numbers in wrong.items()}, dict(warned))
