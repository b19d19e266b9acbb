"""A paired run: one case run twice, and what became of the first finding when one thing was changed in between.

Seed 000: between two runs one variable alone may differ, and a repair counts after the whole verification has passed
again; seed 001: the former first deviation must be gone; seed 002: a second cause may show behind the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: ``mended``: diverged before, aligned now. ``not mended``: the same headline. ``moved``: diverged, with another
#: headline. ``same``: aligned both times. ``broken``: aligned before, diverged now. ``unknown``: one is not comparable.
Outcome = Literal["mended", "not mended", "moved", "same", "broken", "unknown"]


@dataclass(frozen=True)
class Fault:
    """What a finding accuses, without its numbers.

    Attributes:
        path, kind, side, checkpoint: as in :class:`align.findings.Finding`.
        fault: the kind of a wrong index, or the fitted kind of the headline's error; ``None`` if it is not known.
    """

    path: str
    kind: str
    side: str | None = None
    checkpoint: str | None = None
    fault: str | None = None

    def is_that_of(self, other: Fault) -> bool:
        """The same fault. One whose kind is not known (nothing could be fitted) is no other one."""
        place = (self.path, self.kind, self.side, self.checkpoint)
        known = None not in (self.fault, other.fault)
        return place == (other.path, other.kind, other.side, other.checkpoint) and not (
            known and self.fault != other.fault
        )


@dataclass(frozen=True)
class Tried:
    """One patch or option of one side.

    Attributes:
        side: whose.
        kind: ``patch`` or ``option``.
        name: file of the patch, name of the option.
        value: hash of the file, value of the option, as text; ``None`` if it is not known.
    """

    side: str
    kind: str
    name: str
    value: str | None = None

    @property
    def variable(self) -> tuple[str, str, str]:
        """What is changed, whatever it is changed to."""
        return self.side, self.kind, self.name


@dataclass(frozen=True)
class Ran:
    """One of the two runs.

    Attributes:
        verdict: ``aligned``, ``diverged`` or ``not comparable``.
        faults: of its findings, the headline first.
        tried: what a side alone ran with.
        controls: group → name → value of all that should be alike; a group that was not reached is absent.
        effects: ``(group, name)`` of controls that are findings themselves, so that a repair changes them.
    """

    verdict: str
    faults: tuple[Fault, ...] = ()
    tried: tuple[Tried, ...] = ()
    controls: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    effects: frozenset[tuple[str, str]] = frozenset()

    @property
    def headline(self) -> Fault | None:
        """The first finding."""
        return self.faults[0] if self.faults else None


@dataclass(frozen=True)
class Confounder:
    """Something that should be alike and is not.

    Attributes:
        what: its group.
        name: which of the group.
        before, after: values; ``None`` if there is none.
    """

    what: str
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Pair:
    """What two runs say together.

    Attributes:
        added, removed: measures of the later run alone, and of the earlier one alone.
        changes: how many variables differ; an option with another value, or a patch with another content, is one.
        confounded: what else differs.
        gone, appeared: faults of the earlier run alone, and of the later one alone; empty if one is not comparable.
    """

    outcome: Outcome
    added: tuple[Tried, ...] = ()
    removed: tuple[Tried, ...] = ()
    changes: int = 0
    confounded: tuple[Confounder, ...] = ()
    gone: tuple[Fault, ...] = ()
    appeared: tuple[Fault, ...] = ()

    @property
    def unsteady(self) -> bool:
        """Another outcome although nothing was changed."""
        return not self.changes and self.outcome in ("mended", "moved", "broken")

    @property
    def conclusive(self) -> bool:
        """Whether the outcome can be put down to what was changed: one thing at most, and nothing else differs."""
        return self.outcome != "unknown" and self.changes < 2 and not self.confounded and not self.unsteady


def pair(before: Ran, after: Ran) -> Pair:
    """The earlier and the later run of one case."""
    added = _without(after.tried, before.tried)
    removed = _without(before.tried, after.tried)
    comparable = "not comparable" not in (before.verdict, after.verdict)
    return Pair(
        outcome=_outcome(before, after),
        added=added,
        removed=removed,
        changes=_changes(added, removed),
        confounded=tuple(_confounded(before, after, comparable)),
        gone=_not_among(before.faults, after.faults) if comparable else (),
        appeared=_not_among(after.faults, before.faults) if comparable else (),
    )


def _outcome(before: Ran, after: Ran) -> Outcome:
    if "not comparable" in (before.verdict, after.verdict):
        return "unknown"
    if before.verdict == "aligned":
        return "same" if after.verdict == "aligned" else "broken"
    if after.verdict == "aligned":
        return "mended"
    first, now = before.headline, after.headline
    if first is None or now is None:
        return "not mended" if first is now else "moved"
    return "not mended" if now.is_that_of(first) else "moved"


def _not_among(faults: Iterable[Fault], others: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(dict.fromkeys(one for one in faults if not any(one.is_that_of(other) for other in others)))


def _without(some: Iterable[Tried], others: Iterable[Tried]) -> tuple[Tried, ...]:
    """Those of ``some`` that are not among ``others``, as often as they are there."""
    left, found = Counter(others), []
    for one in some:
        if left[one]:
            left[one] -= 1
        else:
            found.append(one)
    return tuple(found)


def _changes(added: Iterable[Tried], removed: Iterable[Tried]) -> int:
    plus, minus = (Counter(one.variable for one in some) for some in (added, removed))
    return sum((plus | minus).values())  # the larger count of each


def _confounded(before: Ran, after: Ran, comparable: bool) -> Iterable[Confounder]:
    """A run that ended early does not differ by what it did not reach."""
    effects = before.effects | after.effects
    for what in (group for group in before.controls if group in after.controls):
        one, other = before.controls[what], after.controls[what]
        for name in dict.fromkeys((*one, *other)):
            if (what, name) in effects or not (comparable or (name in one and name in other)):
                continue
            if one.get(name) != other.get(name):
                yield Confounder(what, name, one.get(name), other.get(name))
