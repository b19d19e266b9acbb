"""What all records of a rank tell together: when each request runs, and which blocks it holds between its steps.

Whether a block is free is not recorded, and need not be: a request owns a block as long as it will still read something
that it has there. The recording is complete when it is judged, so that can be looked up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from align.ledger.record.types import IndexRecord, Indices, Span


def kv_len(indices: Indices, row: int) -> int | None:
    """The length that a row was handed; ``None`` if it was handed none, or that was not recorded."""
    return int(indices.kv_lens[row]) if row < indices.kv_lens.shape[0] else None


@dataclass(frozen=True)
class Visit:
    """A request in a record.

    Attributes:
        record: index of the record.
        row: of the span.
        span: the span itself.
        table: ids of the blocks that hold positions before ``span.end``, as layer 0 was handed them.
    """

    record: int
    row: int
    span: Span
    table: tuple[int, ...]


class Hindsight:
    """Of the records of one rank, in order.

    Args:
        tokens: request → its token ids, prompt and answer; decides which prefixes may be shared.
    """

    def __init__(self, records: Sequence[IndexRecord], tokens: Mapping[str, Sequence[int]] | None) -> None:
        self.records = records
        self.tokens = tokens
        self.visits: dict[str, list[Visit]] = {}
        for number, record in enumerate(records):
            rows = record.base.tables.tolist() if record.base.tables.dim() == 2 else []
            size = record.pool.block_size
            for row, span in enumerate(record.spans):
                if span.real:
                    table = tuple(rows[row][: -(-span.end // size)]) if row < len(rows) else ()
                    self.visits.setdefault(span.request, []).append(Visit(number, row, span, table))
        self._alike: dict[tuple[str, str], int | None] = {}
        self._held: tuple[int, dict[int, list[tuple[Visit, int]]]] | None = None

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        return {request: [visit.record for visit in visits] for request, visits in self.visits.items()}

    def next(self, request: str, record: int) -> Visit | None:
        """The request's first visit in ``record`` or later."""
        at = bisect_left(self._numbers.get(request, []), record)
        return self.visits[request][at] if at < len(self._numbers.get(request, [])) else None

    def previous(self, request: str, record: int) -> Visit | None:
        """The request's last visit before ``record``."""
        at = bisect_left(self._numbers.get(request, []), record)
        return self.visits[request][at - 1] if at else None

    def first_start(self, request: str) -> int:
        """Where the request began: more than 0 after a prefix hit."""
        return self.visits[request][0].span.start

    def holders(self, record: int, block: int) -> list[tuple[Visit, int]]:
        """Who still needs what is in a block once ``record`` is written: ``(next visit, index of the block)``.

        That is who has this block in the table of its next step, and had it there before if that step is a later one
        (else it is not its own yet, or a prefix of somebody that it will come upon). Who comes back with other blocks
        was evicted: in between it held none, also none of those that it happens to be given again.
        """
        if self._held is None or self._held[0] != record:
            held: dict[int, list[tuple[Visit, int]]] = {}
            for request in self.visits:
                visit, before = self.next(request, record), self.previous(request, record)
                if visit is None or (visit.record != record and (before is None or self._evicted(before, visit))):
                    continue
                for index, one in enumerate(visit.table):
                    if visit.record == record or (before is not None and before.table[index : index + 1] == (one,)):
                        held.setdefault(one, []).append((visit, index))
            self._held = record, held
        return self._held[1].get(block, [])

    def _evicted(self, before: Visit, visit: Visit) -> bool:
        """Whether a request gave its blocks back between two visits: it comes back with others."""
        # A window that moves on may have put the reserved block in the place of one that nobody reads any more.
        reserved = self.records[visit.record].pool.reserved
        return any(
            mine != theirs and theirs not in reserved for mine, theirs in zip(before.table, visit.table, strict=False)
        )

    def holder(self, record: int, block: int, offset: int, but: str = "") -> tuple[Visit, int] | None:
        """Who needs what is at a slot once ``record`` is written: ``(visit, position)``.

        Not who writes it anew in a later step before it is read; rows of the same step are needed, too.
        """
        for visit, index in self.holders(record, block):
            position = index * self.records[record].pool.block_size + offset
            needed = visit.span.end if visit.record == record else visit.span.start
            if visit.span.request != but and position < needed:
                return visit, position
        return None

    def alike(self, one: str, other: str) -> int | None:
        """How many tokens two requests have in common from the start; ``None`` if their tokens are not known."""
        key = (one, other) if one <= other else (other, one)
        if key not in self._alike:
            length: int | None = None
            if self.tokens is not None and one in self.tokens and other in self.tokens:
                pairs = zip(self.tokens[one], self.tokens[other], strict=False)
                length = 0
                for mine, theirs in pairs:
                    if mine != theirs:
                        break
                    length += 1
            self._alike[key] = length
        return self._alike[key]

    def shared(self, reader: str, writer: str, position: int) -> bool:
        """Whether a reader may find there what another request wrote at this position: the same prefix."""
        alike = self.alike(reader, writer)
        return position < (self.first_start(reader) if alike is None else alike)

    def occupant(self, record: int, row: int, request: str, index: int, block: int) -> tuple[str, int] | None:
        """Which other request's table had ``block`` at ``index`` in this row of the batch: ``(request, step)``.

        Looked for in earlier records of this run, the latest first, and in the next one. Allocators hand out again
        what was just freed, often in the same row of the batch, so that says nothing of a request that begins here or
        comes back after preemption, nor of a block that it had there in its step before, nor of a request of the next
        step that has not begun.
        """
        before = self.previous(request, record)
        if before is None or before.table[index : index + 1] == (block,) or self._was_left_out(before.record, record):
            return None
        for number in [*range(record - 1, -1, -1), record + 1]:
            if number >= len(self.records) or self.records[number].run != self.records[record].run:
                continue
            other = self.records[number]
            if row >= len(other.spans) or not other.spans[row].real or other.spans[row].request == request:
                continue
            if number > record and self.visits[other.spans[row].request][0].record == number:
                continue
            tables = other.base.tables
            there = tables.dim() == 2 and row < tables.shape[0] and index < tables.shape[1]
            if there and int(tables[row, index]) == block:
                return other.spans[row].request, other.step
        return None

    def _was_left_out(self, before: int, record: int) -> bool:
        """Whether others decoded between two visits of a request: it was preempted, and has blocks of its own again."""
        return any(one.phase in ("decode", "mixed") for one in self.records[before + 1 : record])
