"""Why an operator did more than round, as sentences, and which row shows it best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from align.sentences import Said, said, text_of

#: (request, position).
RowName = tuple[str, int]


@dataclass(frozen=True)
class Worst:
    """The member of a group (tokens, channels, heads) that is nearest to its limit or farthest beyond it.

    Attributes:
        index: of the token in the order given, flat canonical channel, or head; 0 for a kind without heads.
        value: its gain (a factor minus 1) or root mean square error relative to the magnitude.
        allowed: the limit for this one.
    """

    index: int
    value: float
    allowed: float

    @property
    def beyond(self) -> bool:
        return not abs(self.value) <= self.allowed

    @property
    def excess(self) -> float:
        """Times its limit."""
        return abs(self.value) / self.allowed if self.allowed else abs(self.value)


@dataclass(frozen=True)
class Shown:
    """What was measured of one operator, as far as it may be a reason.

    Attributes:
        ratio, allowed: the largest error of an element, and what it may be, in roundings of its magnitude.
        not_finite: elements that are not finite although the exact result is.
        channel: of the largest element.
        largest_name: the row of that element; ``None`` if it is not named.
        token, channels, heads: worst gains.
        norm: worst root mean square error of a token.
        names: of the rows in which tokens are counted.
        has_heads: whether the checkpoint has heads. What has none has one "head", which is all of it.
    """

    ratio: float
    allowed: float
    not_finite: int
    channel: int
    largest_name: RowName | None
    token: Worst | None
    channels: Worst | None
    heads: Worst | None
    norm: Worst | None
    names: Sequence[RowName]
    has_heads: bool


def place_said(name: RowName | None) -> Said:
    """``r2 position 9``; what is not known is said."""
    return said("place.unnamed") if name is None else said("place.row", request=name[0], position=name[1])


def place(name: RowName | None) -> str:
    """The same, in English."""
    return text_of(place_said(name))


def reasons_of(shown: Shown) -> tuple[tuple[Said, ...], RowName | None, str]:
    """Why the operator did more than round, empty if it did not; the row that shows it; and by which test it does:
    ``gain`` and ``norm`` of the whole row, or a single ``element``.
    """
    found: list[Said] = []
    rows: list[tuple[float, RowName | None, str]] = []
    if shown.not_finite:
        several = shown.not_finite > 1
        key = "operator.not_finite" if several else "operator.not_finite_one"
        found.append(said(key, count=shown.not_finite, at=_at(shown, "place.first_at" if several else "place.at")))
        rows.append((inf, shown.largest_name, "element"))
    within = shown.ratio <= shown.allowed
    if not within:
        # The place is that of what is not finite.
        at = "" if shown.not_finite else _at(shown, "place.at")
        found.append(said("operator.element", ratio=shown.ratio, allowed=shown.allowed, at=at))
    for what, worst in (("token", shown.token), ("channel", shown.channels), ("head", shown.heads)):
        if worst is not None and worst.beyond:
            subject = _subject(shown, what, worst)
            found.append(said("operator.gain", subject=subject, factor=1 + worst.value, limit=1 + worst.allowed))
    if shown.norm is not None and shown.norm.beyond:
        subject = place_said(_name_of(shown.names, shown.norm))
        found.append(said("operator.norm", subject=subject, value=shown.norm.value, limit=shown.norm.allowed))
    of_rows = [(one, test) for one, test in ((shown.token, "gain"), (shown.norm, "norm")) if one is not None]
    rows += [(one.excess, _name_of(shown.names, one), test) for one, test in of_rows if one.beyond]
    if not rows and not within:
        rows.append((shown.ratio, shown.largest_name, "element"))
    if not found:
        rows = [(one.excess, _name_of(shown.names, one), test) for one, test in of_rows]
    _, row, test = max(rows, key=lambda one: one[0], default=(0.0, None, ""))
    return tuple(found), row, test


def _subject(shown: Shown, what: str, worst: Worst) -> Said:
    if what == "token":
        return place_said(_name_of(shown.names, worst))
    if what == "head" and not shown.has_heads:
        return said("operator.whole")
    return said(f"operator.{what}", index=worst.index)


def _at(shown: Shown, key: str) -> Said | str:
    if shown.largest_name is None:
        return ""
    return said(key, place=place_said(shown.largest_name), channel=shown.channel)


def _name_of(names: Sequence[RowName], worst: Worst) -> RowName | None:
    return names[worst.index] if worst.index < len(names) else None
