"""What was said of a trial against what must be said, and rates of many with their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from align.drill.trials import Expected
from align.findings import Finding

#: Two-sided 95 %.
_Z = 1.959963984540054


@dataclass(frozen=True)
class Score:
    """What of the expected was said by the first finding; ``None`` where nothing was asked.

    Attributes:
        found: whether anything was called wrong.
        path, side, kind, checkpoint, place: whether each is right; ``place`` is layer, phase, step, request and ranks.
        why: what is not, in words.
    """

    found: bool
    path: bool | None = None
    side: bool | None = None
    kind: bool | None = None
    checkpoint: bool | None = None
    place: bool | None = None
    why: str = ""

    @property
    def right(self) -> bool:
        """Everything that was asked for."""
        return self.found and all(
            one is not False for one in (self.path, self.side, self.kind, self.checkpoint, self.place)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "right": self.right}


def score(expected: Expected, findings: Sequence[Finding], requests: Sequence[str]) -> Score:
    """Judge what a run says first.

    Args:
        requests: names in batch order; the expected request is a number in it.
    """
    if not findings:
        return Score(False, why="nothing was found")
    first = _about(expected, findings)
    wrong: list[str] = []

    def holds(what: str, wanted: Any, found: bool, said: Any) -> bool | None:
        if wanted is None:
            return None
        if not found:
            wrong.append(f"{what} {said}, not {wanted}")
        return found

    path = holds("path", expected.path, first.path == expected.path, first.path)
    side = holds("side", expected.side, first.side == expected.side, first.side)
    # The kinds of path A are all of kind ``slots``; which one the evidence says.
    called = str(first.evidence.get("fault", first.kind)) if first.path == "A" else first.kind
    kind = holds("kind", " or ".join(expected.kinds), called in expected.kinds, called)
    name = holds("checkpoint", expected.checkpoint, first.checkpoint == expected.checkpoint, first.checkpoint)
    request = None if expected.request is None else requests[expected.request]
    victim = first.evidence.get("victim") if first.path == "A" else None
    shown = first.requests if victim is None else (victim.get("request"),)
    places = [
        holds("layer", expected.layer, first.layer == expected.layer, first.layer),
        holds("phase", expected.phase, first.phase == expected.phase, first.phase),
        holds("step", expected.step, first.step == expected.step, first.step),
        holds("request", request, request in shown, ", ".join(shown) or "any"),
        holds("ranks", expected.ranks, first.ranks == expected.ranks, first.ranks),
    ]
    asked = [one for one in places if one is not None]
    return Score(True, path, side, kind, name, all(asked) if asked else None, "; ".join(wrong))


def _about(expected: Expected, findings: Sequence[Finding]) -> Finding:
    """The first finding; of an argument that ruins numbers, the one that the first names as its cause."""
    first = findings[0]
    if expected.path == "FA" and first.path == "B" and first.evidence.get("likely_rules"):
        return next((one for one in findings if one.path == "FA"), first)
    return first


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % interval by Wilson's score.

    Wilson 1927; Brown, Cai, DasGupta 2001 recommend it for rates near 0 and 1. Of nothing the interval is everything.
    """

    hits: int
    count: int

    @property
    def share(self) -> float | None:
        return self.hits / self.count if self.count else None

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return 0.0, 1.0
        n, p = self.count, self.hits / self.count
        centre = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        return max(0.0, centre - half), min(1.0, centre + half)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        low, high = self.interval
        return {"hits": self.hits, "count": self.count, "share": self.share, "low": low, "high": high}


#: Name → rate.
Rates = dict[str, Rate]


def rates(scores: Iterable[Score]) -> Rates:
    """Detection among all, path and checkpoint among all that ask for them, side and place among those found."""
    all_ = list(scores)
    found = [one for one in all_ if one.found]

    def of(name: str, among: Sequence[Score]) -> Rate:
        asked = [one for one in among if getattr(one, name) is not None or not one.found]
        return Rate(sum(getattr(one, name) is True for one in asked), len(asked))

    return {
        "found": Rate(len(found), len(all_)),
        "path": of("path", all_),
        "checkpoint": of("checkpoint", [one for one in all_ if one.checkpoint is not None or not one.found]),
        "side": of("side", found),
        "kind": of("kind", found),
        "place": of("place", found),
        "right": Rate(sum(one.right for one in all_), len(all_)),
    }
