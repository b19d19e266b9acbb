"""What was really found in the cache, against what the shadow says is there: only this sees writes that no tap saw."""

from __future__ import annotations

from typing import Any

import numpy as np

from align.ledger.at import At
from align.ledger.shadow import Ints
from align.ledger.state import legal
from align.ledger.wrong import Entry


def check_sums(at: At) -> None:
    """Of each row that was found other than expected: whether indices explain it, and if not, who wrote it.

    ``at`` is plane 0; rows of other layers are looked up in theirs.
    """
    record, ledger = at.record, at.ledger
    #: (plane, span, position) → the fault that shows in an earlier layer of this step already.
    shown: dict[tuple[int, int, int], Entry] = {}
    where, sums = record.found.where.numpy(), record.found.sums.numpy()
    for (layer, row, position), found in zip(where.tolist(), sums, strict=True):
        plane = ledger.planes.index(layer) if layer in ledger.planes else 0
        here = At(ledger, plane, at.number, record)
        span, key = record.spans[row], (plane, row, position)
        lost = ledger.owned.lost(plane, span.request)
        if (position in lost and key not in shown) or position >= span.end or not here.readable:
            continue
        if (plane, row) in ledger.table_cause:
            continue
        slot = here.slots(row, np.array([position]))
        event = ledger.shadow.read(plane, slot)
        if not legal(here, span.request, np.array([position]), event)[0]:
            continue  # judged by its index
        written = ledger.events.sums_of(int(event[0]), layer)
        if written is None or (written == found).all():
            continue
        if key in shown:
            shown[key].layers.add(layer)
            continue
        entry = _accuse(here, layer, row, position, int(slot[0]), int(event[0]), found)
        lost[position] = shown[key] = entry
        entry.batch = entry.batch or here.batch()
        entry.harmed(record, here.place(row, position), [layer])


def _accuse(at: At, layer: int, row: int, position: int, slot: int, event: int, found: Ints) -> Entry:
    ledger, record, span = at.ledger, at.record, at.record.spans[row]
    by = ledger.events.writer_of(layer, found)
    place = None if by < 0 else at.event(by)
    again = place is not None and (place.request, place.position) == (span.request, position)
    block, offset = record.pool.place(slot)
    before = ledger.shadow.page(at.plane, block)
    after = before.copy()
    after[offset] = by
    first: dict[str, Any] = {"victim": at.place(row, position), "slot": slot, "expected": slot}
    first["page"] = at.page(block, before, after)
    first["detail"] = {"block": block, "zero": not bool(found.any()), "last": slot == record.pool.slots - 1}
    first["call"] = record.calls.get("write", "")
    if place is not None and not again:
        kind = "minus_one" if (at.plane, by) in ledger.slotless else "stomped"
        return ledger.book.open((span.request,), kind, record, layer, writer=place, **first)
    if ledger.events.record(event) == at.number and not record.lossy:
        return ledger.book.open((), "content", record, layer, writer=at.event(event), **first)
    return ledger.book.open((span.request,), "stomped", record, layer, writer=None, **first)
