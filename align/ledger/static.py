"""Checks that the records of a step's indices allow without replaying anything: shapes, ranges, lengths, tables.

Each check yields :class:`Flaw` rows; what they mean and where they hold is told in ``checks.toml``. Slots against block
tables are in :mod:`align.ledger.slots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from align.ledger.hindsight import Hindsight, kv_len
from align.ledger.record.types import NONE, IndexRecord, Indices

_INT32 = ("int32", "torch.int32")


@dataclass(frozen=True)
class Flaw:
    """A check that does not hold.

    Attributes:
        layer: first layer that was handed this.
        row: of the span; −1 for the whole step.
        token: row of the keys; −1 for the whole span.
    """

    kind: str
    layer: int
    row: int = NONE
    token: int = NONE
    slot: int = NONE
    expected: int = NONE
    detail: Mapping[str, Any] = field(default_factory=dict)


def flaws(hindsight: Hindsight, number: int) -> list[Flaw]:
    """What is wrong in the record of this number by itself and by the request's earlier lengths."""
    record = hindsight.records[number]
    found = [*_counts(record), *_dtypes(record), *_dirty(record, number), *_reader(record)]
    for layer in (0, *sorted(record.other)):
        indices = record.at(layer)
        shape = list(_shape(record, indices, layer))
        found += shape
        found += _range(record, indices, layer)
        found += _lengths(hindsight, number, indices, layer)
        found += _queries(record, indices, layer)
        if not shape:
            found += _tables(hindsight, number, indices, layer)
    return found


def _counts(record: IndexRecord) -> Iterator[Flaw]:
    rows = record.rows if record.key_rows is None else record.key_rows
    for layer in (0, *sorted(record.other)):
        count = record.at(layer).slots.shape[0]
        if count != rows:
            yield Flaw("index_count", layer, detail={"slots": count, "rows": rows})


def _dtypes(record: IndexRecord) -> Iterator[Flaw]:
    for name in ("slots", "tables"):
        if record.dtypes.get(name, "int32") not in _INT32:
            yield Flaw("index_dtype", 0, detail={"name": name, "dtype": record.dtypes[name]})


def _dirty(record: IndexRecord, number: int) -> Iterator[Flaw]:
    if number == 0 and record.dirty:
        yield Flaw("dirty_cache", 0, detail={"count": record.dirty})


def _reader(record: IndexRecord) -> Iterator[Flaw]:
    size, used = record.pool.block_size, record.reader_block
    row = next((row for row, span in enumerate(record.spans) if span.real), None)
    if used not in (None, size) and row is not None:
        yield Flaw("reader_block_size", 0, row, detail={"used": used, "block_size": size})


def _shape(record: IndexRecord, indices: Indices, layer: int) -> Iterator[Flaw]:
    shape = list(indices.tables.shape)
    if len(shape) != 2 or shape[0] < len(record.spans):
        yield Flaw("table_shape", layer, detail={"shape": shape, "requests": len(record.spans)})


def _range(record: IndexRecord, indices: Indices, layer: int) -> Iterator[Flaw]:
    row, ends = 0, _ends(record)
    for token, slot in enumerate(indices.slots.tolist()):
        while row < len(ends) - 1 and token >= ends[row]:
            row += 1
        if slot >= record.pool.slots or slot < NONE:
            yield Flaw("outside_pool", layer, row, token, slot, detail={"slots": record.pool.slots})


def _ends(record: IndexRecord) -> list[int]:
    ends, total = [], 0
    for span in record.spans:
        total += span.count
        ends.append(total)
    return ends


# --------------------------------------------------------------------------------------------------------- lengths


def _lengths(hindsight: Hindsight, number: int, indices: Indices, layer: int) -> Iterator[Flaw]:
    record = hindsight.records[number]
    lengths, base, queries = indices.kv_lens.tolist(), record.base.kv_lens.tolist(), indices.q_lens.tolist()
    for row, span in enumerate(record.spans):
        if not span.real or row >= len(lengths) or lengths[row] == span.end:
            continue
        if not record.paged and queries[row : row + 1] == [lengths[row]]:
            continue  # the keys are this step's own, as many as queries: wrong_q_len tells
        detail = {"seen": lengths[row], "expected": span.end}
        of_base = base[row] if row < len(base) else None
        if layer and of_base == span.end:
            yield Flaw("layer_length", layer, row, detail=detail)
        elif not layer or lengths[row] != of_base:
            yield Flaw(_length_kind(hindsight, span.request, layer), layer, row, detail=detail)
        else:
            yield Flaw(_length_kind(hindsight, span.request, 0), layer, row, detail=detail)


def _length_kind(hindsight: Hindsight, request: str, layer: int) -> str:
    """By all steps of a request: one step behind is frozen or one short, and only the next one tells."""
    frozen, doubled = True, True
    handed: int | None = None
    for visit in hindsight.visits[request]:
        before = handed
        handed = kv_len(hindsight.records[visit.record].at(layer), visit.row)
        if handed is not None and handed != visit.span.end:
            frozen &= handed == before
            doubled &= handed == visit.span.end + visit.span.count or (
                before is not None and handed == before + 2 * visit.span.count
            )
    return "frozen_length" if frozen else "doubled_length" if doubled else "wrong_length"


def _queries(record: IndexRecord, indices: Indices, layer: int) -> Iterator[Flaw]:
    handed = indices.q_lens.tolist()
    wrong = False
    for row, span in enumerate(record.spans):
        if span.real and row < len(handed) and handed[row] != span.count:
            wrong = True
            yield Flaw("wrong_q_len", layer, row, detail={"seen": handed[row], "expected": span.count})
    if indices.q_starts is not None and not wrong:
        sums, total = [0], 0
        for span in record.spans:
            total += span.count
            sums.append(total)
        starts = indices.q_starts.tolist()
        if starts != sums:
            row = next((one for one in range(len(sums)) if starts[one : one + 1] != sums[one : one + 1]), len(sums))
            yield Flaw("not_cumulative", layer, max(0, row - 1), detail={"seen": starts, "expected": sums})


# ---------------------------------------------------------------------------------------------------------- tables


def _tables(hindsight: Hindsight, number: int, indices: Indices, layer: int) -> Iterator[Flaw]:
    record = hindsight.records[number]
    pool = record.pool
    for row, span in enumerate(record.spans):
        if not span.real:
            continue
        needed = -(-span.end // pool.block_size)
        table = indices.tables[row, :needed].tolist()
        hole = next((one for one, block in enumerate(table) if block == NONE or block in pool.reserved), None)
        if hole is None and len(table) < needed:
            hole = len(table)
        outside = next((one for one, block in enumerate(table) if block < NONE or block >= pool.blocks), None)
        detail: dict[str, Any] = {"table": table, "needed": needed}
        if outside is not None:
            yield Flaw("table_range", layer, row, detail={**detail, "block": table[outside], "blocks": pool.blocks})
        elif hole is not None:
            block = table[hole] if hole < len(table) else None
            kind = "minus_one" if block == NONE else "short_table"
            if hindsight.first_start(span.request):
                kind = "prefix_missing"
            yield Flaw(kind, layer, row, detail={**detail, "index": hole, "block": block})
        elif len(set(table)) < len(table):
            block = next(block for one, block in enumerate(table) if block in table[:one])
            yield Flaw("table_repeats", layer, row, detail={**detail, "block": block})
