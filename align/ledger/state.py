"""What each request has in the cache by what it was handed, and which of it may be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from align.ledger.record.types import NONE, IndexRecord, Span
from align.ledger.shadow import Ints
from align.ledger.wrong import Entry

if TYPE_CHECKING:
    from align.ledger.at import At

Bools = NDArray[np.bool_]
_ROOM = 64


class Owned:
    """Per plane and request: slot and event of the last write of each position; sums as written and as last found."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, str], Ints] = {}
        self._events: dict[tuple[int, str], Ints] = {}
        self._lost: dict[tuple[int, str], dict[int, Entry]] = {}
        self._sums: dict[str, tuple[Ints, Ints]] = {}
        #: Not all that was found could be recorded: from here on what was not recorded says nothing.
        self._cut = False

    def lost(self, plane: int, request: str) -> dict[int, Entry]:
        """Position → the fault that lost it."""
        return self._lost.setdefault((plane, request), {})

    def wrote(self, plane: int, request: str, positions: Ints, slots: Ints, events: Ints) -> None:
        if len(positions):
            for held, values in ((self._slots, slots), (self._events, events)):
                line = _room(held.get((plane, request)), int(positions[-1]) + 1)
                line[positions] = values
                held[plane, request] = line

    def slot(self, plane: int, request: str, position: int) -> int:
        """Where a position was written last; −1 if it never was."""
        line = self._slots.get((plane, request))
        return NONE if line is None or position >= len(line) else int(line[position])

    def positions(self, plane: int, request: str, block: int, size: int) -> Ints:
        """Positions that a request wrote to a block and nowhere else since, ``[n]``."""
        line = self._slots.get((plane, request))
        found: Ints = (
            np.flatnonzero((line >= 0) & (line // size == block)) if line is not None else np.zeros(0, np.int64)
        )
        return found

    def events(self, plane: int, request: str, count: int) -> Ints:
        """The events that wrote positions from 0; −1 for none."""
        return _room(self._events.get((plane, request)), count)[:count]

    def moved(self, plane: int, request: str, slots: Ints) -> Bools:
        """Of positions from 0: whether the request wrote it, and elsewhere than at these slots."""
        line = _room(self._slots.get((plane, request)), len(slots))[: len(slots)]
        found: Bools = (line >= 0) & (line != slots)
        return found

    # ------------------------------------------------------------------------------------------------------ sums

    def written(self, record: IndexRecord) -> None:
        """Sums of a record: what each request wrote is what it should find, and what it last found; then what differs
        from that."""
        assert record.written is not None
        sums = record.written.numpy()
        first = 0
        for span in record.spans:
            if span.real:
                own, seen = self._both(span.request, record.layers, span.end)
                for held in (own, seen):
                    held[:, span.start : span.end] = sums[:, first : first + span.count]
            first += span.count
        self._cut |= record.found.total > record.found.where.shape[0]
        where, found = record.found.where.numpy(), record.found.sums.numpy()
        for (layer, row, position), value in zip(where.tolist(), found, strict=True):
            span = record.spans[row]
            _, seen = self._both(span.request, record.layers, position + 1)
            seen[layer, position] = value

    def intact(self, at: At, span: Span, count: int) -> Bools:
        """Of positions from 0: whether what was found in all layers of a plane is what this request wrote.

        What was found tells more than indices do: an engine may move blocks without telling.
        """
        if self._cut or at.record.written is None or span.request not in self._sums:
            return np.zeros(count, dtype=np.bool_)
        own, seen = (held[at.layers, :count] for held in self._both(span.request, at.record.layers, count))
        same: Bools = ((own == seen).all(-1) & (own != 0).any(-1)).all(0)
        return same

    def _both(self, request: str, layers: int, end: int) -> tuple[Ints, Ints]:
        held = self._sums.get(request)
        if held is None or held[0].shape[1] < end:
            size = max(_ROOM, 1 << (end - 1).bit_length())
            larger = (np.zeros((layers, size, 2), dtype=np.int64), np.zeros((layers, size, 2), dtype=np.int64))
            if held is not None:
                for new, old in zip(larger, held, strict=True):
                    new[:, : old.shape[1]] = old
            held = self._sums[request] = larger
        return held


def _room(line: Ints | None, count: int) -> Ints:
    if line is not None and len(line) >= count:
        return line
    larger = np.full(max(_ROOM, 2 * count), NONE, dtype=np.int64)
    if line is not None:
        larger[: len(line)] = line
    return larger


def legal(at: At, request: str, positions: Ints, events: Ints) -> Bools:
    """Whether a request may read these events at these positions: its own last write, or the same prefix of another."""
    ledger, plane = at.ledger, at.plane
    own = ledger.owned.events(plane, request, int(positions[-1]) + 1 if len(positions) else 0)
    good: Bools = (events >= 0) & (own[positions] == events)
    rest = (events >= 0) & ~good & (ledger.events.positions(events) == positions)
    owners = ledger.events.owners(events)
    for owner in np.unique(owners[rest]).tolist():
        if owner < 0:
            continue
        these = np.flatnonzero(rest & (owners == owner)).tolist()
        name = ledger.events.named(int(events[these[0]]))[0]
        for one in these:
            tainted = (plane, int(events[one])) in ledger.taint
            good[one] = name != request and not tainted and ledger.hindsight.shared(request, name, int(positions[one]))
    # A misplaced write is no better for standing where somebody looks for it.
    if ledger.taint:
        for one in np.flatnonzero(good).tolist():
            good[one] = (plane, int(events[one])) not in ledger.taint
    return good
