"""Whether an engine failed: it died, could not go on, or computed what is no number. That is not called diverged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

#: In the group ``verdict`` of the words.
FAILED = "engine failed"
_SIDE = "stopped.side"
_NOT_FINITE = "not_finite"


class Found(Protocol):
    """What a finding has, while a run works and in its result."""

    @property
    def kind(self) -> str: ...
    @property
    def evidence(self) -> Any: ...


class Ended(Protocol):
    """What a report and a result have."""

    @property
    def verdict(self) -> str: ...
    @property
    def reason_told(self) -> Mapping[str, Any] | None: ...
    @property
    def findings(self) -> Sequence[Found]: ...


def failed_side(ended: Ended) -> str | None:
    """The side whose engine ended the run: it died, or failed in what it was asked for."""
    told = ended.reason_told
    return str(told["side"]) if told is not None and told.get("say") == _SIDE else None


def not_finite(ended: Ended) -> bool:
    """Whether the headline is that an engine computes NaN or infinities where the exact result is a number."""
    if not ended.findings:
        return False
    first = ended.findings[0]
    sentence = first.evidence.get("sentence")
    return first.kind == "nonfinite" or _says(sentence, _NOT_FINITE)


def word_of(ended: Ended) -> str:
    """The verdict's word in the group ``verdict``: ``engine failed`` instead of ``diverged``."""
    if ended.verdict != "aligned" and failed_side(ended) is not None:
        return FAILED
    return FAILED if ended.verdict == "diverged" and not_finite(ended) else ended.verdict


def lead_of(ended: Ended) -> str:
    """Key of the report's first sentence where an engine failed; empty otherwise."""
    if word_of(ended) != FAILED:
        return ""
    return "lead.not_finite" if failed_side(ended) is None else "lead.failed"


def _says(sentence: Any, what: str) -> bool:
    """Whether a sentence, or a reason in it, is one of these."""
    if not isinstance(sentence, Mapping):
        return False
    if what in str(sentence.get("say", "")).rpartition(".")[2]:
        return True
    return any(_says(one, what) for one in sentence.get("reasons") or ())
