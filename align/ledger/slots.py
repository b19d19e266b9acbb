"""Slots recomputed from block tables: ``slot = table[p // b] * b + p % b``, and what a wrong one follows instead.

All steps of a request are looked at together: a single wrong slot fits many formulas, a whole request few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from align.ledger.hindsight import Hindsight, kv_len
from align.ledger.record.types import NONE, IndexRecord, Indices
from align.ledger.shadow import Ints

#: Block sizes that are tried in place of the pool's, as multiples of it.
_FACTORS = (2, 4, 8, 0.5, 0.25, 0.125)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a record, padding included.

    Attributes:
        span: place of each row's span in the batch ``[N]``.
        position: in its request ``[N]``; −1 for padding and dummies.
        real: whether it belongs to a request ``[N]``.
    """

    span: Ints
    position: Ints
    real: np.ndarray[Any, np.dtype[np.bool_]]


def rows_of(record: IndexRecord) -> Rows:
    span = np.repeat(np.arange(len(record.spans)), [one.count for one in record.spans])
    parts = [
        np.arange(one.start, one.end) if one.real else np.full(one.count, NONE, dtype=np.int64) for one in record.spans
    ]
    position = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return Rows(span, position, position >= 0)


def formula(table: Ints, positions: Ints, block_size: int, unit: int | None = None) -> Ints:
    """The slots of positions through one table row ``[W]``; −1 where the table has no entry.

    Args:
        unit: what a block id is multiplied by; the block size if it is not given.
    """
    index = positions // block_size
    inside = (index < len(table)) & (positions >= 0)
    block = np.where(inside, table[np.where(inside, index, 0)] if len(table) else NONE, NONE)
    return np.where(block < 0, NONE, block * (unit or block_size) + positions % block_size)


def expected_slots(record: IndexRecord, indices: Indices, rows: Rows) -> Ints:
    """What the formula gives each row ``[N]``; −1 for padding."""
    tables = indices.tables.numpy()
    found = np.full(len(rows.span), NONE, dtype=np.int64)
    for row in np.unique(rows.span[rows.real]).tolist():
        mine = rows.span == row
        found[mine] = formula(tables[row], rows.position[mine], record.pool.block_size)
    return found


@dataclass
class _Seen:
    """Slots of one request, over all its steps."""

    position: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    table: list[Ints] = field(default_factory=list)
    others: list[dict[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Hypothesis:
    """What the slots of a request follow: the kind of fault, and numbers for its sentence."""

    kind: str
    detail: dict[str, Any]


def hypothesis(hindsight: Hindsight, request: str, layer: int) -> Hypothesis:
    """What the wrong slots of a request follow in a layer, by all its steps."""
    seen = _gather(hindsight, request, layer)
    slot, expected = np.array(seen.slot), np.array(seen.expected)
    position, wrong = np.array(seen.position), np.array(seen.slot) != np.array(seen.expected)
    size = hindsight.records[0].pool.block_size
    for factor in _FACTORS:
        other = int(size * factor)
        if other < 1 or wrong.sum() < 2:
            continue
        for unit in (other, size):
            given = [formula(t, np.array([p]), other, unit)[0] for t, p in zip(seen.table, position, strict=True)]
            if (np.array(given) == slot).all():
                return Hypothesis("wrong_block_size", {"block_size": size, "used": other, "unit": unit})
    shift = np.unique(slot[wrong] - expected[wrong])
    if len(shift) == 1 and abs(int(shift[0])) < size:
        return Hypothesis("wrong_slot", {"relation": "shift", "by": int(shift[0])})
    for name in dict.fromkeys(name for others in seen.others for name in others):  # always the same of several
        theirs = np.array([others.get(name, NONE) for others in seen.others])
        if (theirs[wrong] == slot[wrong]).all():
            return Hypothesis("wrong_slot", {"relation": "table", "of": name})
    stands = _stands_for(seen, size)
    moved = np.unique(stands[wrong] - position[wrong])
    if (stands[wrong] >= 0).all() and len(moved) == 1:
        return Hypothesis("wrong_slot", {"relation": "position", "by": int(moved[0])})
    return Hypothesis("wrong_slot", {"relation": "none"})


def _stands_for(seen: _Seen, size: int) -> Ints:
    """The position of the request whose slot each is; −1 if it is none of its own."""
    found = []
    for slot, table in zip(seen.slot, seen.table, strict=True):
        place = np.flatnonzero(table == slot // size)
        found.append(int(place[0]) * size + slot % size if len(place) else NONE)
    return np.array(found)


def _gather(hindsight: Hindsight, request: str, layer: int) -> _Seen:
    seen = _Seen()
    for visit in hindsight.visits[request]:
        record = hindsight.records[visit.record]
        indices = record.at(layer)
        tables = indices.tables.numpy()
        if kv_len(indices, visit.row) not in (None, visit.span.end):
            continue  # slots that are derived from a wrong length say nothing
        if tables.ndim != 2 or tables.shape[0] < len(record.spans):
            continue
        first = sum(span.count for span in record.spans[: visit.row])
        slots = indices.slots[first : first + visit.span.count].tolist()
        positions = np.arange(visit.span.start, visit.span.start + len(slots))
        size = record.pool.block_size
        mine = tables[visit.row]
        others = {
            span.request: formula(tables[row], positions, size)
            for row, span in enumerate(record.spans)
            if span.real and span.request != request
        }
        _append(seen, slots, positions, formula(mine, positions, size), mine, others)
    return seen


def _append(
    seen: _Seen, slots: Sequence[int], positions: Ints, expected: Ints, table: Ints, others: dict[str, Ints]
) -> None:
    for at, slot in enumerate(slots):
        if slot >= 0:
            seen.slot.append(slot)
            seen.position.append(int(positions[at]))
            seen.expected.append(int(expected[at]))
            seen.table.append(table)
            seen.others.append({name: int(theirs[at]) for name, theirs in others.items()})
