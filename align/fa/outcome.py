"""What a condition says of a call, and what a check of all rules reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from align.fa.call import Call

#: From the worst to the mildest. ERROR: definitely illegal, or certain to change the result. WARN: highly suspicious or
#: ambiguous. REMIND: a constraint that the caller has to verify. INFO: worth knowing. OK: checked, and right.
SEVERITIES = ("ERROR", "WARN", "REMIND", "INFO", "OK")
LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Outcome:
    """Of one condition: ``fires``, ``holds``, ``absent`` (it does not apply to this call) or ``unknown``.

    Attributes:
        facts: fills the places of the rule's message; of ``unknown``, ``what`` says what would have to be known.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)


HOLDS = Outcome("holds")
ABSENT = Outcome("absent")


def fires(**facts: Any) -> Outcome:
    """The rule has something to say."""
    return Outcome("fires", facts)


def unknown(what: str) -> Outcome:
    """The call may break the rule, but ``what`` is not known."""
    return Outcome("unknown", {"what": what})


def fires_if(condition: bool, **facts: Any) -> Outcome:
    """The rule applies; it has something to say if ``condition``."""
    return fires(**facts) if condition else HOLDS


@dataclass(frozen=True)
class Finding:
    """One sentence of one rule about one call.

    Attributes:
        rule: id, for ``align explain``.
        severity: one of :data:`SEVERITIES`.
        said: language → sentence.
        facts: the values in it.
    """

    rule: str
    severity: str
    said: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """All that the rules say of one call.

    Attributes:
        call: what was checked.
        findings: the worst first, in the order of the rules.
        held: rules that were checked and hold.
        unknown: rule → what would have to be known to check it.
    """

    call: Call
    findings: tuple[Finding, ...]
    held: tuple[str, ...]
    unknown: Mapping[str, str]

    def of(self, *severities: str) -> tuple[Finding, ...]:
        """The findings of these severities."""
        return tuple(one for one in self.findings if one.severity in severities)

    @property
    def errors(self) -> tuple[Finding, ...]:
        return self.of("ERROR")

    @property
    def ok(self) -> bool:
        """No ERROR. No verdict about precision: that needs a comparison of numbers."""
        return not self.errors

    def lines(self, language: str = "en") -> Iterator[str]:
        """``[ERROR] sentence (rule)`` for each finding."""
        for one in self.findings:
            yield f"[{one.severity}] {one.said[language]} ({one.rule})"

    def text(self, language: str = "en") -> str:
        return "\n".join(self.lines(language))

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "operator": self.call.operator,
            "phase": self.call.context.phase,
            "layer": self.call.context.layer,
            "findings": [
                {"rule": one.rule, "severity": one.severity, "said": dict(one.said), "facts": dict(one.facts)}
                for one in self.findings
            ],
            "held": list(self.held),
            "not_observable": dict(self.unknown),
        }
