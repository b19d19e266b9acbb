"""Where the replay stands: one layer plane of one record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from align.ledger.hindsight import kv_len
from align.ledger.record.types import IndexRecord, Indices
from align.ledger.shadow import Ints
from align.ledger.slots import formula
from align.ledger.state import legal
from align.ledger.wrong import Claim, Entry, Page, Place, Row

if TYPE_CHECKING:
    from align.ledger.ledger import Ledger

#: Kinds whose fault lies in what attention was handed, not in what the write was.
OF_READS = frozenset(
    ("short_table", "prefix_missing", "prefix_foreign", "stale_table", "foreign_row", "unwritten_history",
     "table_range", "table_repeats", "table_shape", "not_cumulative", "wrong_q_len", "frozen_length",
     "doubled_length", "wrong_length", "layer_length", "reader_block_size")
)  # fmt: skip


@dataclass(frozen=True)
class At:
    """A plane (index into the ledger's planes) of a record (with its number in the rank's records)."""

    ledger: Ledger
    plane: int
    number: int
    record: IndexRecord

    @property
    def layer(self) -> int:
        """The first layer of the plane."""
        return self.ledger.planes[self.plane]

    @property
    def indices(self) -> Indices:
        return self.record.at(self.layer)

    @property
    def size(self) -> int:
        """Of a block."""
        return self.record.pool.block_size

    @property
    def readable(self) -> bool:
        """Whether there is a row of the block table for each span."""
        tables = self.indices.tables
        return tables.dim() == 2 and tables.shape[0] >= len(self.record.spans)

    @cached_property
    def layers(self) -> list[int]:
        """All layers of the plane."""
        if self.plane:
            return [self.layer]
        return [layer for layer in range(self.record.layers) if layer == 0 or layer not in self.ledger.planes]

    def slots(self, row: int, positions: Ints) -> Ints:
        """The slots of positions through a row of the block table."""
        return formula(self.indices.tables[row].numpy(), positions, self.size)

    def table(self, row: int) -> list[int]:
        """The blocks that a row's length needs."""
        needed = -(-self.record.spans[row].end // self.size)
        found: list[int] = np.asarray(self.indices.tables[row, :needed]).tolist()
        return found

    def place(self, row: int, position: int) -> Place:
        """A position of a row of this record."""
        span = self.record.spans[row]
        return Place(span.request, position, self.record.step, row, span.occurrence, span.kind, self.record.rank)

    def event(self, event: int) -> Place:
        """Who wrote."""
        return self.ledger.events.place(event, self.record.rank)

    def page(self, block: int, before: Ints, after: Ints, doubted: str = "") -> Page:
        """A block before and after, in names, and whose each slot should be by the block tables of this step.

        Args:
            before, after: events ``[block_size]``.
            doubted: a request whose block table is wrong; where it wrote its tokens itself counts instead.
        """
        named = [tuple(self.ledger.events.named(int(event)) for event in page) for page in (before, after)]
        should: list[list[Claim]] = [[] for _ in range(self.size)]
        lost: set[int] = set()
        for request, positions, end in self._claims(block, doubted):
            offsets = positions % self.size if request != doubted else self._offsets(request, positions)
            good = legal(self, request, positions, after[offsets])
            for offset, position, right in zip(offsets.tolist(), positions.tolist(), good.tolist(), strict=True):
                should[offset].append(Claim(request, position, position < end))
                if position < end and not right:
                    lost.add(offset)
        return Page(block, named[0], named[1], tuple(map(tuple, should)), frozenset(lost), doubted)

    def _claims(self, block: int, doubted: str) -> Iterator[tuple[str, Ints, int]]:
        """Requests whose block it is, with the positions that belong there, and up to which they are needed."""
        for visit, index in self.ledger.hindsight.holders(self.number, block):
            if visit.span.request != doubted:
                end = visit.span.end if visit.record == self.number else visit.span.start
                yield visit.span.request, np.arange(index * self.size, (index + 1) * self.size), end
        for span in self.record.spans:
            if doubted and span.request == doubted:
                wrote = self.ledger.owned.positions(self.plane, doubted, block, self.size)
                yield doubted, wrote[wrote < span.start], span.start

    def _offsets(self, request: str, positions: Ints) -> Ints:
        slots = [self.ledger.owned.slot(self.plane, request, position) % self.size for position in positions.tolist()]
        return np.array(slots, dtype=np.int64)

    def batch(self) -> tuple[Row, ...]:
        """The requests of the step."""
        hits = self.ledger.hindsight.first_start
        rows = [
            Row(
                span.request, row, hits(span.request), span.start, span.end, kv_len(self.indices, row),
                tuple(self.table(row)) if self.readable else (),
            )
            for row, span in enumerate(self.record.spans) if span.real
        ]  # fmt: skip
        return tuple(replace(row, shared=self._shared(row, rows)) for row in rows)

    def _shared(self, row: Row, rows: Sequence[Row]) -> int:
        """How many blocks of a table others have in theirs as well, because they begin with the same tokens."""
        most = 0
        for other in rows:
            pairs = zip(row.table, other.table, strict=False)
            same = 0 if other is row else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            alike = partial(self.ledger.hindsight.shared, row.request, other.request)
            while same and not alike(same * self.size - 1):
                same -= 1
            most = max(most, same)
        return most

    def open(self, key: tuple[Any, ...], kind: str, **first: Any) -> Entry:
        """The fault under this key, as it shows here."""
        of, made = ("read", "tables") if kind in OF_READS else ("write", "slots")
        places = {"call": self.record.calls.get(of, ""), "made": self.record.calls.get(made, "")}
        entry = self.ledger.book.open(key, kind, self.record, self.layer, **{**places, **first})
        entry.batch = entry.batch or self.batch()
        return entry
