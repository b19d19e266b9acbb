"""What became of findings from one run to a later one: new, known, moved, fixed. A pure rule over two lists.

A finding is recognised by what it accuses (:class:`align.walk.paired.Fault`), never by its numbers, so that the same
fault on another night, machine or prompt is the same finding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from align.result.pair import ran_of
from align.result.schema import Result
from align.walk.paired import Fault

#: ``new``: only the later run has it. ``known``: both have it. ``moved``: the later run has one of the same path, kind
#: and side at another place. ``fixed``: only the earlier run has it. ``unknown``: the other run is not comparable.
State = Literal["new", "moved", "known", "fixed", "unknown"]
STATES: tuple[State, ...] = ("new", "moved", "known", "fixed", "unknown")


@dataclass(frozen=True)
class Found:
    """A finding without its numbers, and its sentence with them."""

    fault: Fault
    summary: str

    @property
    def fingerprint(self) -> str:
        """12 hex digits over what is accused.

        Of a wrong cache index its kind belongs to it, which is always known; the fitted kind of another error does not,
        because a fit that fails would make another finding of it.
        """
        fault = self.fault
        index = fault.fault if fault.path == "A" else None
        text = json.dumps([fault.path, fault.kind, fault.side, fault.checkpoint, index])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        fault = self.fault
        return {
            "fingerprint": self.fingerprint,
            "path": fault.path,
            "kind": fault.kind,
            "side": fault.side,
            "checkpoint": fault.checkpoint,
            "fault": fault.fault,
            "summary": self.summary,
        }

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Found:
        """The inverse of :meth:`to_dict`."""
        fault = Fault(plain["path"], plain["kind"], plain["side"], plain["checkpoint"], plain["fault"])
        return cls(fault, plain["summary"])


@dataclass(frozen=True)
class Change:
    """One finding of either run, or of both.

    Attributes:
        before, after: as the earlier and the later run have it; ``None`` where one has not.
    """

    state: State
    before: Found | None
    after: Found | None

    @property
    def found(self) -> Found:
        """The later run's, or the earlier one's if that is gone."""
        found = self.after or self.before
        assert found is not None
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "state": self.state,
            "before": None if self.before is None else self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
        }


def found_in(result: Result) -> tuple[Found, ...] | None:
    """The findings of a result, the headline first; ``None`` where the sides could not be compared."""
    if result.verdict == "not comparable":
        return None
    faults = ran_of(result).faults
    return tuple(Found(fault, one.summary) for fault, one in zip(faults, result.findings, strict=True))


def changes(before: Sequence[Found] | None, after: Sequence[Found] | None) -> tuple[Change, ...]:
    """What became of each finding, the later run's first and in its order.

    Args:
        before, after: of the two runs; ``None`` for one that is not comparable, or that there is none of. Against such
            a run nothing is new, and nothing is fixed.
    """
    if before is None or after is None:
        return (
            *(Change("unknown", None, one) for one in after or ()),
            *(Change("unknown", one, None) for one in before or ()),
        )
    left = list(before)
    states: dict[int, Change] = {}
    rules: tuple[tuple[Callable[[Found], object], State], ...] = ((_place, "known"), (_kind, "moved"))
    for key, state in rules:
        for at, one in enumerate(after):
            same = next((other for other in left if key(other) == key(one)), None)
            if at not in states and same is not None:
                left.remove(same)
                states[at] = Change(state, same, one)
    return (
        *(states.get(at, Change("new", None, one)) for at, one in enumerate(after)),
        *(Change("fixed", one, None) for one in left),
    )


def _place(one: Found) -> str:
    return one.fingerprint


def _kind(one: Found) -> tuple[str, str, str | None]:
    return one.fault.path, one.fault.kind, one.fault.side
