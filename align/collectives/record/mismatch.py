"""Ranks of one group that do not make the same call, found while the engine runs, before anybody waits for ever."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from align.collectives.record.types import ALL_GATHER, ALL_TO_ALL, BARRIER, COMBINE, DISPATCH, CollectiveCall, Place

_FILE = "mismatch.json"


@dataclass(frozen=True)
class Mismatch:
    """Two ranks of a group whose next calls of it do not belong together.

    Attributes:
        rank: global rank that found it; it did not make its call.
        peer: the other one.
        differ: names of what differs: ``operation``, ``dtype``, ``reduce``, ``root``, ``size``, ``checkpoint``;
            ``rows``: one expects of the other another number of rows than that one sends; or ``count``: one of both has
            ended its forward without such a call.
        mine, theirs: the call of ``rank`` and that of ``peer``; ``None`` for who has ended its forward.
        ended: where in the run the forward was that ended without the call; ``None`` unless ``count`` differs.
        before: the last call of the group in which both agreed, as ``rank`` made it; ``None`` if there was none.
    """

    rank: int
    peer: int
    differ: tuple[str, ...]
    mine: CollectiveCall | None
    theirs: CollectiveCall | None
    ended: Place | None = None
    before: CollectiveCall | None = None

    def __post_init__(self) -> None:
        assert self.mine is not None or self.theirs is not None

    @property
    def calls(self) -> tuple[tuple[int, CollectiveCall | None], ...]:
        """Both ranks with their next calls, the lower rank first."""
        return tuple(sorted([(self.rank, self.mine), (self.peer, self.theirs)], key=lambda one: one[0]))

    def _calls(self) -> dict[str, CollectiveCall | None]:
        return {"mine": self.mine, "theirs": self.theirs, "before": self.before}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "rank": self.rank,
            "peer": self.peer,
            "differ": list(self.differ),
            **{key: None if call is None else call.to_dict() for key, call in self._calls().items()},
            "ended": None if self.ended is None else asdict(self.ended),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Mismatch:
        """The inverse of :meth:`to_dict`, also of its JSON."""
        given = {key: plain[key] for key in ("mine", "theirs", "before")}
        calls = {key: None if call is None else CollectiveCall.from_dict(call) for key, call in given.items()}
        ended = plain["ended"]
        place = None if ended is None else Place(**{**ended, "inside": tuple(ended["inside"])})
        return cls(plain["rank"], plain["peer"], tuple(plain["differ"]), ended=place, **calls)


class CollectiveMismatch(RuntimeError):  # noqa: N818 - ranks that do not match
    """Raised in the rank that found a :class:`Mismatch`, instead of making a call that nobody would answer."""

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(said(mismatch))
        self.mismatch = mismatch


def said(mismatch: Mismatch) -> str:
    """Both ranks' next calls in words."""
    parts = []
    for rank, call in mismatch.calls:
        if call is None:
            assert mismatch.ended is not None
            parts.append(f"rank {rank} has ended its forward ({_step(mismatch.ended)}) without another call")
            continue
        site = f" at {call.site[0]}" if call.site else ""
        parts.append(
            f"rank {rank} calls {call.operation} of {call.dtype or 'nothing'} {_shapes(call)}"
            f" for {call.where or 'no checkpoint'} ({_step(call.place)}){_rows(mismatch, call)}{site}"
        )
    one = mismatch.mine or mismatch.theirs
    assert one is not None
    return (
        f"the ranks {', '.join(map(str, one.group))} do not make the same collective as number {one.in_group} of group "
        f"{one.group_name}: {'; '.join(parts)}"
    )


def _rows(mismatch: Mismatch, call: CollectiveCall) -> str:
    return f", sends {list(call.sent)} rows and expects {list(call.received)}" if "rows" in mismatch.differ else ""


def _shapes(call: CollectiveCall) -> str:
    return " ".join(str(list(shape)) for shape in call.given[:1])


def _step(place: Place) -> str:
    return f"run {place.generation}, step {place.step}{', dummy' if place.dummy else ''}"


def differences(mine: CollectiveCall, theirs: CollectiveCall) -> tuple[str, ...]:
    """What two ranks' calls with one number in one group do not agree in, as far as they have to.

    Call sites and steps may differ: a source runs other code than a receiver, and one data-parallel group computes a
    dummy while another computes requests.
    """
    found = [name for name in ("operation", "dtype", "reduce", "root") if getattr(mine, name) != getattr(theirs, name)]
    if "operation" not in found and _size(mine) != _size(theirs):
        found.append("size")
    if "operation" not in found and not _meet(mine, theirs):
        found.append("rows")
    if mine.place.inside != theirs.place.inside:
        found.append("checkpoint")
    return tuple(found)


def _meet(one: CollectiveCall, other: CollectiveCall) -> bool:
    """Whether each expects of the other as many rows as that one sends, as far as both say so."""
    if any(len(counts) != len(one.group) for call in (one, other) for counts in (call.sent, call.received)):
        return True
    here, there = (one.group.index(call.rank) for call in (one, other))
    return one.sent[there] == other.received[here] and other.sent[here] == one.received[there]


def _size(call: CollectiveCall) -> int | None:
    """Elements that every rank of the group must have alike; ``None`` where ranks may differ."""
    if call.operation in (ALL_TO_ALL, BARRIER, DISPATCH, COMBINE):
        return None
    if call.operation == ALL_GATHER:  # ranks may give parts of different lengths
        return _elements(call.got)
    return _elements(call.given)  # of a reduce_scatter all parts together


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def leave_mismatch(directory: Path, mismatch: Mismatch) -> None:
    """Write it where the driver looks. Both ranks may find it; one of them is kept, whole."""
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"{_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(mismatch.to_dict()), encoding="utf-8")
    if (directory / _FILE).exists():
        temporary.unlink()
    else:
        os.replace(temporary, directory / _FILE)


def read_mismatch(directory: Path) -> Mismatch | None:
    """What a worker left; ``None`` if the ranks agree so far.

    Args:
        directory: of the records.
    """
    try:
        plain = json.loads((directory / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Mismatch.from_dict(plain)
