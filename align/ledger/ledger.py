"""The replay: writes and reads of every step, in order, against the shadow of the cache.

In each step of a rank: static checks; then every layer plane's writes enter the shadow, each judged against its block
table and against who else still needs that slot; then the rows that attention reads through the block tables must be
what this request (or one with the same prefix) wrote for this position; and what workers really found in the cache must
have the checksum of what was written. What a fault leaves behind is its consequence and no fault of its own: rows that
it wrote are *tainted*, positions that it lost are *lost*, and whoever reads them is its victim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from align.ledger import slots
from align.ledger.at import At
from align.ledger.attend import history, read
from align.ledger.hindsight import Hindsight, kv_len
from align.ledger.looked import Looked, looked_at
from align.ledger.record.types import NONE, IndexRecord
from align.ledger.shadow import Events, Ints, Shadow
from align.ledger.state import Owned
from align.ledger.static import Flaw, flaws
from align.ledger.sums import check_sums
from align.ledger.writes import write
from align.ledger.wrong import Book, Entry, Wrong

#: Kinds that make all indices of a row meaningless: nothing else is asked of it in that step.
_OF_TABLES = ("table_range", "minus_one", "short_table", "prefix_missing", "table_repeats")
#: Kinds that make the arguments of a row wrong, and of those behind it.
_OF_ALL_ROWS = ("table_shape", "wrong_q_len", "not_cumulative", "reader_block_size")
_OF_LENGTHS = ("frozen_length", "doubled_length", "wrong_length", "layer_length")


@dataclass(frozen=True)
class Audit:
    """What was found in the records of all ranks.

    Attributes:
        wrongs: each fault once, in order of rank, step and layer.
        records: that were looked at.
        unseen: what could not be judged, and why.
        looked: how much was.
    """

    wrongs: tuple[Wrong, ...]
    records: int
    unseen: tuple[str, ...]
    looked: Looked


def audit(
    records: Sequence[IndexRecord], tokens: Mapping[str, Sequence[int]] | None = None, complete: bool = True
) -> Audit:
    """Replay the records of one engine run.

    Args:
        records: of all ranks, each rank's in the order in which it computed; dummies included. A request's name is
            its own: two runs of one engine that ask for the same need different ones.
        tokens: request → its token ids (prompt and answer): they decide which prefixes may be shared.
        complete: the records begin with the first request that the engine ever had; otherwise a prefix hit may be of
            what was written before.
    """
    wrongs: list[Wrong] = []
    unseen: set[str] = set()
    replayed: list[IndexRecord] = []
    for rank in sorted({record.rank for record in records}):
        left, whole = [record for record in records if record.rank == rank], complete
        while left:
            ledger = Ledger(left, tokens, whole)
            wrongs += ledger.replay()
            unseen |= ledger.unseen
            replayed += left[: ledger.broken]
            if ledger.broken is None:
                break
            # What stands in the cache is not known any more; the next run begins with requests of its own.
            run = left[ledger.broken].run
            left, whole = [record for record in left[ledger.broken + 1 :] if record.run > run], False
    return Audit(tuple(wrongs), len(records), tuple(sorted(unseen)), looked_at(replayed))


class Ledger:
    """Of one rank; see :func:`audit`. Its parts are for the modules of this package."""

    def __init__(
        self, records: Sequence[IndexRecord], tokens: Mapping[str, Sequence[int]] | None, complete: bool = True
    ) -> None:
        self.records, self.complete = records, complete
        self.hindsight = Hindsight(records, tokens)
        #: First layer of each plane; the layers without a plane of their own go with layer 0.
        self.planes = [0, *sorted({layer for record in records for layer in record.other if layer})]
        self.events = Events()
        self.shadow = Shadow(len(self.planes), records[0].pool.block_size if records else 1)
        self.book = Book()
        self.owned = Owned()
        #: (plane, event) → the fault that it belongs to.
        self.taint: dict[tuple[int, int], Entry] = {}
        #: (plane, slot) that should have been written → the fault that wrote elsewhere.
        self.void: dict[tuple[int, int], Entry] = {}
        #: (plane, block, its two requests) → the fault.
        self.disputed: dict[tuple[int, int, frozenset[str]], Entry] = {}
        #: (plane, event) of rows that were handed no slot.
        self.slotless: set[tuple[int, int]] = set()
        #: Of the step that is replayed: (plane, row) → the fault of its table or length; plane → that of its counts.
        self.table_cause: dict[tuple[int, int], Entry] = {}
        self.length_cause: dict[tuple[int, int], Entry] = {}
        self.count_cause: dict[int, Entry] = {}
        self.unseen: set[str] = set()
        #: The record that could not be replayed.
        self.broken: int | None = None
        if any(record.written is None for record in records):
            self.unseen.add("writes that no index accounts for: checksums were not taken")
        if any(record.lossy for record in records):
            self.unseen.add("written = key_states: the cache holds another dtype than the keys")
        if tokens is None:
            self.unseen.add("whose prefix a hit is: token ids are not known")
        self._hypotheses: dict[tuple[str, int], slots.Hypothesis] = {}

    def replay(self) -> list[Wrong]:
        """What is wrong, in order of run, step and layer; up to a malformed record, which :attr:`broken` tells."""
        for number, record in enumerate(self.records):
            try:
                self._replay(number, record)
            except Exception as error:  # whatever a worker wrote: one bad record must not abort a comparison
                self.broken = number
                where = f"run {record.run} of rank {record.rank} from its step {record.step} on"
                self.unseen.add(f"{where}: the record is malformed: {type(error).__name__}: {error}")
                break
        return self.book.wrongs()

    def _replay(self, number: int, record: IndexRecord) -> None:
        events = self.events.add(number, record)
        self.table_cause, self.length_cause, self.count_cause = {}, {}, {}
        planes = [At(self, plane, number, record) for plane in range(len(self.planes))]
        if any(at.indices.kv_lens.shape[0] < len(record.spans) for at in planes):
            self.unseen.add("lengths: fewer of them than rows of the batch were handed over, or recorded")
        for flaw in flaws(self.hindsight, number):
            self._note(planes, flaw, events)
        if record.written is not None:
            self.owned.written(record)
        for at in planes:
            history(at)
            write(at, events)
        for at in planes:
            read(at)
        check_sums(planes[0])

    def hypothesis(self, request: str, layer: int) -> slots.Hypothesis:
        """What the wrong slots of a request follow."""
        if (request, layer) not in self._hypotheses:
            self._hypotheses[request, layer] = slots.hypothesis(self.hindsight, request, layer)
        return self._hypotheses[request, layer]

    def _note(self, planes: Sequence[At], flaw: Flaw, events: Ints) -> None:
        """Enter a static fault, and what it explains in this step."""
        if flaw.kind == "outside_pool":
            return  # judged along with the other slots
        record = planes[0].record
        span = record.spans[flaw.row] if flaw.row >= 0 else None
        request = "" if span is None else span.request
        position = NONE if span is None or not span.real else span.end - 1
        affected = [at for at in planes if at.layer == flaw.layer or (not flaw.layer and at.layer not in record.other)]
        writer = None if span is None else planes[0].place(flaw.row, position)
        first: dict[str, Any] = {"slot": flaw.slot, "expected": flaw.expected, "detail": dict(flaw.detail)}
        if flaw.kind in _OF_ALL_ROWS:
            first["victim"] = writer  # its own attention is the first that is handed the wrong argument
        entry = affected[0].open((request,), flaw.kind, writer=writer, **first)
        bounds = np.cumsum([0, *(one.count for one in record.spans)])
        for at in affected:
            entry.note(record, at.layers, request, "handed")
            _mislead(entry, at, flaw)
            if flaw.kind == "index_count":
                self.count_cause[at.plane] = entry
            elif flaw.kind in _OF_LENGTHS:
                self.length_cause[at.plane, flaw.row] = entry
            elif flaw.kind in _OF_TABLES:
                self.table_cause[at.plane, flaw.row] = entry
                for event in events[bounds[flaw.row] : bounds[flaw.row + 1]].tolist():
                    self.taint[at.plane, event] = entry


def _mislead(entry: Entry, at: At, flaw: Flaw) -> None:
    """Attention that is handed wrong arguments is wrong whatever the cache holds."""
    record = at.record
    if flaw.kind in _OF_LENGTHS and record.paged:
        handed = kv_len(at.indices, flaw.row)
        end = record.spans[flaw.row].end
        entry.misled(record, at.place(flaw.row, min(end if handed is None else handed, end)), at.layer)
    elif flaw.kind in _OF_ALL_ROWS and (record.paged or flaw.kind != "table_shape"):
        for span in record.spans[max(0, flaw.row) :]:
            if span.real:
                entry.reach.setdefault(span.request, (at.layer, span.start))
