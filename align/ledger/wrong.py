"""What the audit found wrong, and the book that keeps each fault once however often it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from align.ledger.record.types import NONE, IndexRecord

#: Of forwards with requests.
_PHASES = ("prefill", "decode", "mixed")
#: Kinds whose writer has a wrong block table: what it says of whose a block is means nothing.
_OF_TABLES = frozenset(
    ("stale_table", "foreign_row", "table_range", "minus_one", "short_table", "prefix_missing", "table_repeats")
)


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
class Claim:
    """Whose place a slot is by a request's block table; ``needed``: its token must be there once the step has written,
    otherwise it comes in a later step."""

    request: str
    position: int
    needed: bool


@dataclass(frozen=True)
class Page:
    """One block of a layer before and after: ``(owner, position)`` per offset; the owner ``""`` has written nothing.

    Attributes:
        should: per offset what the block tables say of it.
        lost: offsets where somebody who needs its token does not find it afterwards.
        doubted: the request whose block table is wrong; of it ``should`` says where it wrote itself.
    """

    block: int
    before: tuple[tuple[str, int], ...]
    after: tuple[tuple[str, int], ...]
    should: tuple[tuple[Claim, ...], ...] = ()
    lost: frozenset[int] = frozenset()
    doubted: str = ""


@dataclass(frozen=True)
class Row:
    """A request's row of the batch.

    Attributes:
        row: place in the batch, from 0.
        hit: positions that a prefix cache gave it when it began.
        start, end: of the positions that this step computes; those before ``start`` are in the cache.
        kv_len: as attention was handed it; ``None`` if that is not known.
        table: as handed over, as far as ``end`` needs it; empty if that cannot be told.
        shared: how many of its blocks, from the first, others have as well, for they begin with the same tokens.
    """

    request: str
    row: int
    hit: int
    start: int
    end: int
    kv_len: int | None
    table: tuple[int, ...]
    shared: int = 0


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
        home: the block where that should have stood that was written elsewhere; ``None`` if it is the same one.
        batch: rows of the requests of the step in which it showed first.
        first_read: whose attention was the first to read what the fault left; ``None`` if nobody did.
        read_layer: of that read.
        written: rows that were written where they must not be; in how many layers, ``layers`` says.
        missed: times that attention looks for a token and finds another there, or nothing; anew in each step.
        handed: times that a wrong argument was handed over.
        steps, layers, requests, phases: all that show it.
        layers_of: how many layers there are.
        call: ``file:line`` in the engine where the index was used.
        made: where the engine makes such indices, ``file:line function``, one after the other.
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
    home: Page | None = None
    batch: tuple[Row, ...] = ()
    first_read: Place | None = None
    read_layer: int = NONE
    written: int = 0
    missed: int = 0
    handed: int = 0
    steps: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    layers_of: int = 0
    requests: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    call: str = ""
    made: str = ""
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
        #: ``written``, ``missed``, ``handed``: see :class:`Wrong`.
        self.counts: Counter[str] = Counter()
        self.batch: tuple[Row, ...] = ()
        self.steps: set[int] = set()
        self.layers: set[int] = set()
        self.requests: dict[str, None] = {}
        self.runs: set[int] = set()
        self.phases: set[str] = set()
        self.reach: dict[str, tuple[int, int]] = {}

    @property
    def doubted(self) -> str:
        """The request whose block table is wrong; empty if none is."""
        writer: Place | None = self.first.get("writer")
        return writer.request if writer is not None and self.kind in _OF_TABLES else ""

    def note(self, record: IndexRecord, layers: Sequence[int], request: str, what: str) -> None:
        """It shows here as well: ``what`` is a name of :attr:`counts`."""
        self.counts[what] += 1
        self.steps.add(record.step)
        self.layers.update(layers)
        self.runs.add(record.run)
        self.phases.add(record.phase)
        if request:
            self.requests.setdefault(request)

    def harmed(self, record: IndexRecord, place: Place, layers: Sequence[int]) -> None:
        """What it left was found where a request looks for its own; read by attention if that reads the cache."""
        self.note(record, layers, place.request, "missed")
        if self.victim is None:
            self.victim = place
        if record.paged:
            self.misled(record, place, layers[0])

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
            read_layer=self.read_layer, batch=self.batch, written=self.counts["written"],
            missed=self.counts["missed"], handed=self.counts["handed"], steps=tuple(sorted(self.steps)),
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
            entry = Entry(kind, record.rank, record.step, layer, run=record.run, layers_of=record.layers, **first)
            self.entries[(kind, record.run, *key)] = entry
        return entry

    def wrongs(self) -> list[Wrong]:
        """In the order in which they showed first."""
        made = [entry.made() for entry in self.entries.values()]
        return sorted(made, key=lambda one: (one.run, one.step, one.layer))
