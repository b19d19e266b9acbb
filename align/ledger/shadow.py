"""The shadow: for every (layer, block, offset) that was ever written, by which row of which step.

Layers that are always handed the same share one *plane*; a layer with indices of its own has one of its own. Only
blocks that were touched take room.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from align.ledger.record.types import NONE, IndexRecord
from align.ledger.wrong import Place

Ints = NDArray[np.int64]
#: Owners that are no request.
_NOBODY = {"padding": -2, "dummy": -3, "idle": -4}
_ROOM = 64


class Events:
    """Every row that was ever written, as a number: what it was."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._ids: dict[str, int] = {}
        self._table = np.zeros((_ROOM, 6), dtype=np.int64)
        self.count = 0
        #: Event → sums ``[layers, 2]`` as written, as far as they were recorded; per record.
        self.sums: list[tuple[int, Ints]] = []

    def owner(self, request: str) -> int:
        if request not in self._ids:
            self._ids[request] = len(self._names)
            self._names.append(request)
        return self._ids[request]

    def add(self, number: int, record: IndexRecord) -> Ints:
        """Make the events of a record's rows: their numbers, int64 ``[N]``."""
        rows = []
        for row, span in enumerate(record.spans):
            owner = self.owner(span.request) if span.real else _NOBODY[span.kind]
            rows += [
                (owner, span.start + one if span.real else NONE, number, row, span.occurrence, record.step)
                for one in range(span.count)
            ]
        first, self.count = self.count, self.count + len(rows)
        while self.count > len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        if rows:
            self._table[first : self.count] = rows
        if record.written is not None:
            self.sums.append((first, record.written.numpy()))
        return np.arange(first, self.count)

    def owners(self, events: Ints) -> Ints:
        """Owner of each event; −1 for none."""
        return np.where(events < 0, NONE, self._table[events, 0])

    def positions(self, events: Ints) -> Ints:
        return np.where(events < 0, NONE, self._table[events, 1])

    def record(self, event: int) -> int:
        """In which record it was."""
        return int(self._table[event, 2])

    def place(self, event: int, rank: int) -> Place:
        owner, position, _, row, occurrence, step = (int(value) for value in self._table[event])
        kind = "real" if owner >= 0 else next(name for name, number in _NOBODY.items() if number == owner)
        return Place(self._names[owner] if owner >= 0 else "", position, step, row, occurrence, kind, rank)

    def named(self, event: int) -> tuple[str, int]:
        """``(owner, position)``; nobody has written event −1."""
        if event < 0:
            return "", NONE
        place = self.place(event, 0)
        return place.request or place.kind, place.position

    def sums_of(self, event: int, layer: int) -> Ints | None:
        """The sums of an event as written, ``[2]``; ``None`` if they were not taken."""
        at = bisect_right(self.sums, event, key=lambda one: one[0]) - 1
        if at < 0 or event - self.sums[at][0] >= self.sums[at][1].shape[1]:
            return None
        sums: Ints = self.sums[at][1][layer, event - self.sums[at][0]]
        return sums

    def writer_of(self, layer: int, sums: Ints) -> int:
        """The latest event whose key and value had these sums in a layer; −1 if there is none."""
        if not sums.any():
            return NONE
        for first, written in reversed(self.sums):
            hit = np.flatnonzero((written[layer] == sums).all(-1))
            if hit.size:
                return first + int(hit[-1])
        return NONE


class Shadow:
    """Which event wrote each slot last, per plane."""

    def __init__(self, planes: int, block_size: int) -> None:
        self._size = block_size
        self._index: dict[int, int] = {}
        self._pages: Ints = np.full((planes, _ROOM, block_size), NONE, dtype=np.int64)

    def _at(self, slots: Ints, make: bool) -> tuple[Ints, Ints]:
        blocks, offsets = np.divmod(slots, self._size)
        unique, inverse = np.unique(blocks, return_inverse=True)
        if make:
            for block in unique.tolist():
                self._index.setdefault(block, len(self._index))
            while len(self._index) > self._pages.shape[1]:
                self._pages = np.concatenate([self._pages, np.full_like(self._pages, NONE)], axis=1)
        place = np.array([self._index.get(block, NONE) for block in unique.tolist()], dtype=np.int64)
        return place[inverse.reshape(-1)], offsets

    def write(self, plane: int, slots: Ints, events: Ints) -> Ints:
        """Events that were there before, ``[n]``; of two writes to one slot the later one stays."""
        pages, offsets = self._at(slots, True)
        before: Ints = self._pages[plane, pages, offsets].copy()
        self._pages[plane, pages, offsets] = events
        return before

    def read(self, plane: int, slots: Ints) -> Ints:
        """Events at these slots, ``[n]``; −1 where nothing was written, and for a slot that is none."""
        pages, offsets = self._at(np.maximum(slots, 0), False)
        return np.where((slots < 0) | (pages < 0), NONE, self._pages[plane, pages, offsets])

    def page(self, plane: int, block: int) -> Ints:
        """The events of one block, ``[block_size]``."""
        at = self._index.get(block, NONE)
        return np.full(self._size, NONE) if at < 0 else self._pages[plane, at].copy()
