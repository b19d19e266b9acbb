"""What attention reads: through each request's block table, what the shadow says is there."""

from __future__ import annotations

from typing import Any

import numpy as np

from align.ledger.at import At
from align.ledger.hindsight import kv_len
from align.ledger.record.types import NONE
from align.ledger.state import legal
from align.ledger.wrong import Entry


def history(at: At) -> None:
    """Rows whose table does not lead to what this request wrote: judged before the writes of this step."""
    owned = at.ledger.owned
    for row, span in enumerate(at.record.spans):
        if not span.real or not span.start or not at.readable or at.ledger.table_cause.get((at.plane, row)):
            continue
        positions = np.arange(span.start)
        slots = at.slots(row, positions)
        bad = owned.moved(at.plane, span.request, slots)
        if not bad.any():
            continue
        found = at.ledger.shadow.read(at.plane, slots)
        bad &= ~legal(at, span.request, positions, found)
        bad &= ~owned.intact(at, span, span.start)
        lost = owned.lost(at.plane, span.request)
        events = owned.events(at.plane, span.request, span.start)
        #: A step in which one position went astray is why the others that it wrote are elsewhere, too.
        causes = {
            at.ledger.events.record(int(events[one])): lost[one] for one in np.flatnonzero(bad).tolist() if one in lost
        }
        for position in (one for one in np.flatnonzero(bad).tolist() if one not in lost):
            cause = causes.get(at.ledger.events.record(int(events[position])))
            if cause is None:
                _accuse_table(at, row, position, int(slots[position]), int(found[position]))
                break
            lost[position] = cause


def _accuse_table(at: At, row: int, position: int, slot: int, event: int) -> None:
    """A request's history is looked for in blocks that it was not written to."""
    span, index, block = at.record.spans[row], position // at.size, slot // at.size
    writer = at.place(row, span.start)
    detail: dict[str, Any] = {"block": block, "start": span.start, "index": index}
    of = _same_row(at, row, index, block)
    before = at.ledger.hindsight.occupant(at.number, row, span.request, index, block)
    if of:
        kind = "foreign_row"
        detail["of"] = of
    elif before is not None:
        kind = "stale_table"
        detail |= {"of": before[0], "of_step": before[1]}
    elif event >= 0 and (at.plane, event) in at.ledger.taint:
        return  # what stands there belongs to another fault
    else:
        kind = "unwritten_history"
    page = at.ledger.shadow.page(at.plane, block)
    first = {"victim": at.place(row, position), "slot": slot, "detail": detail}
    first["writer"] = writer if kind != "unwritten_history" else None if event < 0 else at.event(event)
    doubted = span.request if kind != "unwritten_history" else ""
    own = at.ledger.owned.slot(at.plane, span.request, position)
    first["page"] = at.page(block, page, page, doubted)
    if own >= 0 and own // at.size != block:
        home = at.ledger.shadow.page(at.plane, own // at.size)
        first["home"] = at.page(own // at.size, home, home, doubted)
    entry = at.open((span.request,), kind, expected=own, **first)
    entry.note(at.record, at.layers, span.request, "handed")
    at.ledger.table_cause[at.plane, row] = entry


def _same_row(at: At, row: int, index: int, block: int) -> str:
    """The other request of this step that has this block at this place of its own row."""
    for other, span in enumerate(at.record.spans):
        if span.real and other != row and index * at.size < span.end and int(at.indices.tables[other, index]) == block:
            return span.request
    return ""


def read(at: At) -> None:
    """Every row of the cache that attention reads in this step, after its writes."""
    if not at.readable:
        return
    for row, span in enumerate(at.record.spans):
        if not span.real:
            continue
        handed = kv_len(at.indices, row)
        length = min(span.end if handed is None else handed, at.indices.tables.shape[1] * at.size)
        if not at.record.paged:
            length = min(length, span.end)  # nothing is read by that length: what is there is looked at, no more
        positions = np.arange(max(length, 0))
        slots = at.slots(row, positions)
        found = at.ledger.shadow.read(at.plane, slots)
        bad = ~legal(at, span.request, positions, found)
        if bad.any():
            bad &= ~at.ledger.owned.intact(at, span, len(bad))
        for position in np.flatnonzero(bad).tolist():
            _bad_read(at, row, position, int(slots[position]), int(found[position]))


def _bad_read(at: At, row: int, position: int, slot: int, event: int) -> None:
    span, ledger = at.record.spans[row], at.ledger
    lost = ledger.owned.lost(at.plane, span.request)
    cause = lost.get(position) or ledger.table_cause.get((at.plane, row)) or ledger.taint.get((at.plane, event))
    cause = cause or ledger.void.get((at.plane, slot)) or ledger.length_cause.get((at.plane, row))
    cause = cause or _unexplained(at, row, position, slot, event)
    if cause is not None:
        lost[position] = cause
        cause.harmed(at.record, at.place(row, position), at.layers)


def _unexplained(at: At, row: int, position: int, slot: int, event: int) -> Entry | None:
    """A read that no fault so far explains."""
    span, ledger = at.record.spans[row], at.ledger
    own = ledger.owned.slot(at.plane, span.request, position)
    writer = None if event < 0 else at.event(event)
    block = slot // at.size if slot >= 0 else NONE
    detail: dict[str, Any] = {"block": block, "start": span.start}
    if own >= 0:
        kind = "stomped" if own == slot else "unwritten_history"
        detail |= {"zero": event < 0, "last": slot == at.record.pool.slots - 1}
    elif position < ledger.hindsight.first_start(span.request):
        if writer is None and not ledger.complete:
            ledger.unseen.add("prefix hits of what was written before the recording began")
            return None
        if (cause := _of_prefix(at, span.request, position)) is not None:
            return cause
        foreign = writer is not None and writer.request != span.request
        kind = "prefix_foreign" if foreign else "prefix_missing"
        detail["table"] = at.table(row)
        if writer is not None and foreign:
            detail["of"] = writer.request or writer.kind
        else:
            writer = at.place(row, span.start)
    else:
        kind = "not_written"
    page = ledger.shadow.page(at.plane, block)
    first: dict[str, Any] = {"writer": writer, "victim": at.place(row, position), "slot": slot, "expected": own}
    doubted = span.request if kind == "prefix_missing" else ""
    return at.open((span.request,), kind, detail=detail, page=at.page(block, page, page, doubted), **first)


def _of_prefix(at: At, request: str, position: int) -> Entry | None:
    """The fault that lost this position of another request with the same prefix: the hit was of that one.

    Not of one of an earlier run that did not compute it, but had a wrong hit itself: which block a later run is given
    is decided anew.
    """
    hindsight, owned = at.ledger.hindsight, at.ledger.owned
    for other in hindsight.visits:
        cause = owned.lost(at.plane, other).get(position)
        if cause is None or other == request or not hindsight.shared(request, other, position):
            continue
        computed = owned.events(at.plane, other, position + 1)[position] >= 0
        if computed or hindsight.records[hindsight.visits[other][0].record].run == at.record.run:
            return cause
    return None
