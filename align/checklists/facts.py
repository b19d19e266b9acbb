"""What the items ask a result for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from align.checklists.fa import FaFacts
from align.result.checklists import State
from align.result.ledger import LedgerAudit, LedgerLooked
from align.result.parts import Condition, Finding, Recording
from align.result.schema import Result
from align.result.tensors import LayerCounts
from align.sentences import Said, raw, said, told

SIDES = ("candidate", "reference")
_LAYOUT = re.compile(r"tp(\d+) dp(\d+) ep(\d+)")


@dataclass(frozen=True)
class Answer:
    """What came of an item.

    Attributes:
        state: see :data:`align.result.checklists.State`.
        what: evidence or reason.
        count: on how many it was evaluated.
        findings: their numbers, from 1.
    """

    state: State
    what: Said
    count: int | None = None
    findings: tuple[int, ...] = ()


def ok(count: int, key: str, /, **values: object) -> Answer:
    """Evaluated, and nothing is wrong. Of nothing at all there is no such answer."""
    assert count > 0, key
    return Answer("ok", said(f"checklist.{key}", **values), count)


def failed(key: str, findings: tuple[int, ...] = (), count: int | None = None, **values: object) -> Answer:
    return Answer("failed", said(f"checklist.{key}", **values), count, findings)


def hidden(key: str, /, **values: object) -> Answer:
    """Not observable."""
    return Answer("not observable", said(f"checklist.{key}", **values))


def apart(key: str, /, **values: object) -> Answer:
    """Not applicable."""
    return Answer("not applicable", said(f"checklist.{key}", **values))


@dataclass(frozen=True)
class Facts:
    """A result, and attention's calls of it (``None``: not recorded)."""

    result: Result
    fa: FaFacts | None = None
    #: Findings with their numbers, from 1.
    numbered: tuple[tuple[int, Finding], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbered", tuple(enumerate(self.result.findings, 1)))

    # ----------------------------------------------------------------------------------------------- the run as a whole

    @property
    def stopped(self) -> Answer | None:
        """Of a run that was not compared: nothing that needs a comparison is observable."""
        if self.result.verdict != "not comparable":
            return None
        return hidden("stopped", reason=told(self.result.reason_told or raw(self.result.reason.split("\n", 1)[0])))

    @property
    def headline(self) -> Finding | None:
        return self.result.findings[0] if self.result.findings else None

    @property
    def layout(self) -> tuple[int, int, int] | None:
        """TP, DP, EP; ``None`` without a case."""
        found = None if self.result.case is None else _LAYOUT.fullmatch(self.result.case.layout)
        return None if found is None else (int(found[1]), int(found[2]), int(found[3]))

    @property
    def model(self) -> dict[str, object]:
        """What is known about the model."""
        return next((one.about for one in self.result.facts if one.name == "model"), {})

    # ----------------------------------------------------------------------------------------------------- conditions

    @cached_property
    def conditions(self) -> dict[str, Condition]:
        return {one.name: one for one in self.result.conditions}

    def held(self, *names: str) -> Answer:
        """Conditions as an answer: all must hold."""
        known = [self.conditions[name] for name in names if name in self.conditions]
        wrong = [one for one in known if one.verdict == "false"]
        if wrong:
            numbers = self._configured({one.name for one in wrong})
            return failed("condition_false", numbers, parts=[_why(one) for one in wrong])
        if not self.result.conditions:
            return self.stopped or hidden("no_conditions")
        unread = [_why(one) for one in known if one.verdict == "unknown"]
        unread += [said("checklist.not_judged", name=name) for name in names if name not in self.conditions]
        if unread:
            return hidden("condition_unknown", parts=unread)
        return ok(len(known), "condition_ok", count=len(known), parts=[observed(one) for one in known])

    # ------------------------------------------------------------------------------------------------------- findings

    def of_kind(self, *kinds: str) -> tuple[int, ...]:
        return tuple(number for number, one in self.numbered if one.kind in kinds)

    def _configured(self, names: Collection[str]) -> tuple[int, ...]:
        """Findings that an engine computes otherwise than its checkpoint says, which is told by these conditions."""
        return tuple(
            number
            for number, one in self.numbered
            if one.kind == "configuration"
            and any(told_by.get("condition") in names for told_by in one.evidence.get("conditions", ()))
        )

    def of_fault(self, faults: Collection[str]) -> tuple[int, ...]:
        """Path A, by the kind of the wrong index."""
        return tuple(number for number, one in self.numbered if one.evidence.get("fault") in faults)

    def whats(self, numbers: Collection[int]) -> list[Said]:
        """What these findings say."""
        return [what_of(one) for number, one in self.numbered if number in numbers]

    # --------------------------------------------------------------------------------------------------------- ledger

    def ledger(self) -> tuple[dict[str, LedgerLooked], Answer | None]:
        """By side how much the audit looked at; and why that is not known of one."""
        looked: dict[str, LedgerLooked] = {}
        for side in SIDES:
            one = self.result.ledger.get(side)
            if one is None:
                return {}, hidden("no_audit", side=side)
            if not one.observable or one.looked is None:
                return {}, hidden("not_audited", side=side, why=self._unseen(one))
            looked[side] = one.looked
        return looked, None

    def recordings(self) -> tuple[dict[str, Recording], Answer | None]:
        """By side what was compared consists of; and why that is not known."""
        found = dict(self.result.recordings)
        if found:
            return found, None
        return {}, hidden("earlier") if self.result.tensors is not None else self.stopped or hidden("no_tensors")

    def _unseen(self, one: LedgerAudit) -> Said:
        return raw(one.unseen[0]) if one.unseen else said("checklist.earlier")

    # -------------------------------------------------------------------------------------------------------- tensors

    def layer_0(self) -> LayerCounts | None:
        tensors = self.result.tensors
        return None if tensors is None else next((one for one in tensors.layers if one.layer == 0), None)


def what_of(finding: Finding) -> Said:
    """Its evidence as a sentence."""
    sentence = finding.evidence.get("sentence")
    return sentence if isinstance(sentence, dict) else raw(str(finding.evidence.get("what", finding.summary)))


def compared(layer: LayerCounts) -> int:
    """Its checkpoints that were compared."""
    return layer.equal + layer.within + layer.beyond


def observed(one: Condition) -> Said:
    """A condition that holds, with what was read back."""
    values = {side: _short(value) for side, value in one.observed.items()}
    if len(set(values.values())) == 1:
        return said("checklist.condition", name=one.name, values=list(values.values())[:1])
    sides = [said("checklist.side_value", side=side, value=value) for side, value in values.items()]
    return said("checklist.condition", name=one.name, values=sides)


def _short(value: object) -> str:
    return "…" if isinstance(value, dict | list) else str(value)


def _why(one: Condition) -> Said:
    return said("checklist.condition_why", name=one.name, why=told(one.why_told or raw(one.why)))


def damaged(recordings: Mapping[str, Recording]) -> Answer | None:
    """The failure of recordings with files that cannot be read; ``None`` if all can."""
    broken = [text for one in recordings.values() for text in one.damaged]
    if not broken:
        return None
    return failed("damaged", count=len(broken), files=len(broken), parts=[raw(text) for text in broken[:3]])


def per_side(counts: dict[str, int]) -> Iterator[Said]:
    """``candidate 51``."""
    return (said("checklist.of_side", side=side, count=count) for side, count in counts.items())
