"""What the audit found wrong, and the book that keeps each fault once however often it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from align.ledger.record.types import NONE, IndexRecord

#: Of forwards with requests.
_PHASES = ("prefill", "decode", "mixed")


@dataclass(frozen=True)
class Place:
    """A row of a step: who wrote, who read, who lost something.

    ``request`` is empty and ``position`` −1 for padding and dummy rows, which ``kind`` tells; ``row`` is the span's
    place in the batch.
    """

    request: str
    position: int
    step: int
    row: int = NONE
    occurrence: int = 0
    kind: str = "real"
    rank: int = 0


@dataclass(frozen=True)
class Page:
    """One block of a layer before and after: ``(owner, position)`` per offset; the owner ``""`` has written nothing."""

    block: int
    before: tuple[tuple[str, int], ...]
    after: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Wrong:
    """One fault.

    Attributes:
        kind: a key of :func:`align.ledger.table.checks`.
        rank, step, layer: where it showed first; the layer is the first of those that were handed the same.
        writer: who used the wrong index, or wrote what should not have been written; ``None`` if no tap saw it.
        victim: whose key and value were lost or not found; ``None`` if nobody's.
        slot, expected: what was used and what the formula gives; −1 if it is not about a slot.
        detail: what the kind's sentence needs, and more; JSON-able.
        page: the block in question.
        first_read: whose attention was the first to read what the fault left; ``None`` if nobody did.
        read_layer: of that read.
        count: places that show it, over steps and layers.
        steps, layers, requests, phases: all that show it.
        call: ``file:line`` in the engine.
        run: of the launch in which it showed first.
        runs: all that show it.
        reach: request → layer and position from which on its attention is wrong for it, in the last of ``runs``; the
            position is that of the query. Empty if no attention is.
    """

    kind: str
    rank: int
    step: int
    layer: int
    writer: Place | None
    victim: Place | None
    slot: int = NONE
    expected: int = NONE
    detail: Mapping[str, Any] = field(default_factory=dict)
    page: Page | None = None
    first_read: Place | None = None
    read_layer: int = NONE
    count: int = 1
    steps: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    call: str = ""
    run: int = 0
    runs: tuple[int, ...] = ()
    reach: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Entry:
    """A fault while it is being collected."""

    def __init__(self, kind: str, rank: int, step: int, layer: int, **first: Any) -> None:
        self.kind, self.rank, self.step, self.layer = kind, rank, step, layer
        self.first = first
        self.victim: Place | None = first.pop("victim", None)
        self.read: Place | None = None
        self.read_layer = NONE
        self.count = 0
        self.steps: set[int] = set()
        self.layers: set[int] = set()
        self.requests: dict[str, None] = {}
        self.runs: set[int] = set()
        self.phases: set[str] = set()
        self.reach: dict[str, tuple[int, int]] = {}

    def note(self, record: IndexRecord, layer: int, request: str = "") -> None:
        """It shows here as well."""
        self.count += 1
        self.steps.add(record.step)
        self.layers.add(layer)
        self.runs.add(record.run)
        self.phases.add(record.phase)
        if request:
            self.requests.setdefault(request)

    def harmed(self, record: IndexRecord, place: Place, layer: int) -> None:
        """What it left was found where a request looks for its own; read by attention if that reads the cache."""
        self.note(record, layer, place.request)
        if self.victim is None:
            self.victim = place
        if record.paged:
            self.misled(record, place, layer)

    def misled(self, record: IndexRecord, place: Place, layer: int) -> None:
        """Attention of a request reads what is not its own, or not all that is: key ``place`` is the first."""
        if self.read is None:
            self.read, self.read_layer = place, layer
        start = record.spans[place.row].start
        before = self.reach.get(place.request, (layer, start))
        self.reach[place.request] = (min(before[0], layer), min(before[1], start))

    def made(self) -> Wrong:
        return Wrong(
            self.kind, self.rank, self.step, self.layer, victim=self.victim or self.read, first_read=self.read,
            read_layer=self.read_layer, count=max(1, self.count), steps=tuple(sorted(self.steps)),
            layers=tuple(sorted(self.layers)), requests=tuple(self.requests), runs=tuple(sorted(self.runs)),
            phases=tuple(one for one in _PHASES if one in self.phases), reach=dict(self.reach),
            **{"writer": None, **self.first},
        )  # fmt: skip


class Book:
    """Faults of one rank, by what makes them the same: kind, run, request, layer plane."""

    def __init__(self) -> None:
        self.entries: dict[tuple[Any, ...], Entry] = {}

    def open(self, key: tuple[Any, ...], kind: str, record: IndexRecord, layer: int, **first: Any) -> Entry:
        """The entry under this key, made from what was seen first."""
        entry = self.entries.get((kind, record.run, *key))
        if entry is None:
            entry = Entry(kind, record.rank, record.step, layer, run=record.run, **first)
            self.entries[(kind, record.run, *key)] = entry
        return entry

    def wrongs(self) -> list[Wrong]:
        """In the order in which they showed first."""
        made = [entry.made() for entry in self.entries.values()]
        return sorted(made, key=lambda one: (one.run, one.step, one.layer))
