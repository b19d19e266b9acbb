"""Where the replay stands: one layer plane of one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from align.ledger.record.types import IndexRecord, Indices
from align.ledger.shadow import Ints
from align.ledger.slots import formula
from align.ledger.wrong import Entry, Place

if TYPE_CHECKING:
    from align.ledger.ledger import Ledger

#: Kinds whose fault lies in what attention was handed, not in what the write was.
OF_READS = frozenset(
    ("short_table", "prefix_missing", "prefix_foreign", "stale_table", "foreign_row", "unwritten_history",
     "table_range", "table_repeats", "table_shape", "not_cumulative", "wrong_q_len", "frozen_length",
     "doubled_length", "wrong_length", "layer_length")
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

    @property
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

    def open(self, key: tuple[Any, ...], kind: str, **first: Any) -> Entry:
        """The fault under this key, as it shows here."""
        call = self.record.calls.get("read" if kind in OF_READS else "write", "")
        return self.ledger.book.open(key, kind, self.record, self.layer, call=call, **first)
