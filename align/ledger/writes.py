"""What a step writes: each row against its block table, and against who else still needs that slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from align.ledger.at import At
from align.ledger.hindsight import Visit
from align.ledger.record.types import NONE
from align.ledger.shadow import Ints
from align.ledger.slots import expected_slots, rows_of
from align.ledger.wrong import Entry, Place


@dataclass(frozen=True)
class _Token:
    """A row of the keys."""

    row: int
    position: int
    slot: int
    expected: int
    event: int


#: A fault, a block that it is about, and what that is to it: ``page`` or ``home`` of :class:`align.ledger.wrong.Wrong`.
_Accused = tuple[Entry, int, str]


def write(at: At, events: Ints) -> None:
    """Judge the writes of a step, and enter them into the shadow."""
    record, ledger = at.record, at.ledger
    rows = rows_of(record)
    slots = np.full(len(rows.span), NONE, dtype=np.int64)
    handed = at.indices.slots.numpy()[: len(slots)]
    slots[: len(handed)] = handed
    ledger.slotless |= {(at.plane, event) for event in events[slots == NONE].tolist()}
    expected = expected_slots(record, at.indices, rows) if at.readable else slots
    tokens = [_Token(*map(int, one)) for one in zip(rows.span, rows.position, slots, expected, events, strict=True)]
    accused: list[_Accused] = []
    clean: list[_Token] = []
    for token in tokens:
        span = record.spans[token.row]
        caused = (at.plane, token.row) in ledger.table_cause
        if token.slot == token.expected and token.slot < record.pool.slots and not caused:
            if span.real:
                clean.append(token)
            continue
        entry = _misplaced(at, token) if span.real else _nobody(at, token)
        if entry is not None:
            if span.real:
                ledger.void[at.plane, token.expected] = entry
            _taint(at, token, entry, accused)
    shaky = _conflicts(at, clean, accused)
    before = {block: ledger.shadow.page(at.plane, block) for _, block, _ in accused}
    inside = (slots >= 0) & (slots < record.pool.slots)
    ledger.shadow.write(at.plane, slots[inside], events[inside])
    for token in clean if ledger.void else ():
        ledger.void.pop((at.plane, token.slot), None)
    for row, span in enumerate(record.spans):
        if span.real:
            mine = rows.span == row
            ledger.owned.wrote(at.plane, span.request, rows.position[mine], slots[mine], events[mine])
            lost = ledger.owned.lost(at.plane, span.request)
            for token in (token for token in clean if lost and token.row == row):
                if (at.plane, token.event) not in ledger.taint:
                    lost.pop(token.position, None)
    for token in clean if shaky else ():
        cause = shaky.get((token.row, token.slot // at.size))
        if cause is not None:
            ledger.owned.lost(at.plane, record.spans[token.row].request).setdefault(token.position, cause)
    for entry, block, what in accused:
        if what not in entry.first:
            after = ledger.shadow.page(at.plane, block)
            entry.first[what] = at.page(block, before[block], after, entry.doubted)


def _taint(at: At, token: _Token, entry: Entry, accused: list[_Accused]) -> None:
    at.ledger.taint[at.plane, token.event] = entry
    span = at.record.spans[token.row]
    entry.note(at.record, at.layers, span.request, "written")
    if span.real:
        at.ledger.owned.lost(at.plane, span.request)[token.position] = entry
    if 0 <= token.slot < at.record.pool.slots:
        accused.append((entry, token.slot // at.size, "page"))
    first = entry.first.get("expected", NONE) == token.expected != NONE and entry.step == at.record.step
    if first and token.expected // at.size != token.slot // at.size:
        accused.append((entry, token.expected // at.size, "home"))


def _victim(at: At, held: tuple[Visit, int] | None) -> Place | None:
    if held is None:
        return None
    visit, position = held
    return Place(visit.span.request, position, at.record.step, visit.row, visit.span.occurrence, rank=at.record.rank)


def _nobody(at: At, token: _Token) -> Entry | None:
    """A padding or dummy row with a slot."""
    span, pool = at.record.spans[token.row], at.record.pool
    if token.slot == NONE:
        return None
    if not 0 <= token.slot < pool.slots:
        return _outside(at, token)
    block, offset = pool.place(token.slot)
    if block in pool.reserved:
        return None
    victim = _victim(at, at.ledger.hindsight.holder(at.number, block, offset))
    if victim is None and (span.kind == "padding" or not pool.reserved):
        return None  # nobody reads it
    kind = "padding_write" if span.kind == "padding" else "dummy_write"
    detail = {"block": block, "offset": offset, "reserved": list(pool.reserved), "rows": span.kind}
    key = ("" if victim is None else victim.request,)
    return at.open(key, kind, writer=at.place(token.row, NONE), victim=victim, slot=token.slot, detail=detail)


def _outside(at: At, token: _Token) -> Entry:
    writer, detail = at.place(token.row, token.position), {"slots": at.record.pool.slots}
    return at.open((writer.request,), "outside_pool", writer=writer, slot=token.slot, detail=detail)


def _misplaced(at: At, token: _Token) -> Entry:
    """The fault of a request's row whose slot is not what its block table says, or whose table is wrong."""
    ledger, span, pool = at.ledger, at.record.spans[token.row], at.record.pool
    cause = ledger.table_cause.get((at.plane, token.row))
    if cause is None and token.slot == NONE:
        cause = ledger.count_cause.get(at.plane)
    if cause is None and (length := ledger.length_cause.get((at.plane, token.row))):
        # Slots that are derived from the length are wrong along with it.
        by = int(at.indices.kv_lens[token.row]) - span.end
        if token.slot == int(at.slots(token.row, np.array([token.position + by]))[0]):
            cause = length
    if cause is not None:
        return cause
    writer = at.place(token.row, token.position)
    if token.slot == NONE:
        first = {"writer": writer, "victim": writer, "expected": token.expected}
        return at.open((span.request,), "not_written", detail={"phase": at.record.phase}, **first)
    if not 0 <= token.slot < pool.slots:
        return _outside(at, token)
    guess = ledger.hypothesis(span.request, at.layer)
    held = ledger.hindsight.holder(at.number, *pool.place(token.slot), but=span.request)
    victim = _victim(at, held)
    theirs = {} if held is None else {"victim_table": list(held[0].table)}
    detail = {
        **guess.detail,
        **theirs,
        "table": at.table(token.row),
        "block_size": at.size,
        "taken": victim is not None,
    }
    first = {"writer": writer, "victim": victim, "expected": token.expected}
    return at.open((span.request,), guess.kind, slot=token.slot, detail=detail, **first)


def _conflicts(at: At, tokens: list[_Token], accused: list[_Accused]) -> dict[tuple[int, int], Entry]:
    """Rows that write where their table says: into a block that another request needs as well, or twice.

    Returns:
        (row, block) → the fault, of which other positions of that block may be a consequence.
    """
    shaky: dict[tuple[int, int], Entry] = {}
    hindsight, pool = at.ledger.hindsight, at.record.pool
    slots: dict[int, _Token] = {}
    twice: list[tuple[_Token, _Token]] = []
    causes: dict[int, Entry] = {}
    for token in tokens:
        one = at.record.spans[token.row].request
        first = slots.setdefault(token.slot, token)
        held = hindsight.holder(at.number, *pool.place(token.slot), but=one)
        if held is not None:
            visit, position = held
            other = visit.span.request
            prefix = hindsight.shared(one, other, position) or hindsight.shared(other, one, position)
            explained = visit.record == at.number and (at.plane, visit.row) in at.ledger.table_cause
            if not explained and not (prefix and position == token.position):
                causes[token.row] = _accuse_owner(at, token, visit, position)
                shaky[token.row, token.slot // at.size] = causes[token.row]
                _taint(at, token, causes[token.row], accused)
                continue
        if first is not token:
            twice.append((first, token))
    for first, token in twice:
        if _same_bits(at, first, token):
            continue
        entry = causes.get(token.row) or causes.get(first.row)
        if entry is None:
            detail = {"of": at.record.spans[first.row].request, "block": token.slot // at.size}
            places = {"writer": at.place(token.row, token.position), "victim": at.place(first.row, first.position)}
            key = (at.record.spans[token.row].request,)
            entry = at.open(key, "duplicate_slot", slot=token.slot, detail=detail, **places)
        for both in (first, token):
            _taint(at, both, entry, accused)
            shaky[both.row, both.slot // at.size] = entry
    return shaky


def _same_bits(at: At, first: _Token, token: _Token) -> bool:
    """Whether two rows are one position of one prefix and hold the same bits: either may be written last."""
    ledger, record = at.ledger, at.record
    one, other = record.spans[first.row].request, record.spans[token.row].request
    hindsight = ledger.hindsight
    if first.position != token.position or one == other:
        return False
    if not (hindsight.shared(one, other, token.position) or hindsight.shared(other, one, token.position)):
        return False
    layers = [at.layer] if at.plane else [layer for layer in range(record.layers) if layer not in ledger.planes[1:]]
    sums = [(ledger.events.sums_of(first.event, layer), ledger.events.sums_of(token.event, layer)) for layer in layers]
    return all(mine is not None and theirs is not None and (mine == theirs).all() for mine, theirs in sums)


def _accuse_owner(at: At, token: _Token, visit: Visit, position: int) -> Entry:
    """Two requests need one block: that is one fault for as long as it lasts."""
    one, other = at.record.spans[token.row].request, visit.span.request
    key = (at.plane, token.slot // at.size, frozenset((one, other)))
    if key not in at.ledger.disputed:
        at.ledger.disputed[key] = _two_owners(at, token, visit, position)
    return at.ledger.disputed[key]


def _two_owners(at: At, token: _Token, visit: Visit, position: int) -> Entry:
    """A stale row of the table tells whose the block is not."""
    hindsight, block = at.ledger.hindsight, token.slot // at.size
    one, other = at.record.spans[token.row].request, visit.span.request
    mine = hindsight.occupant(at.number, token.row, one, token.position // at.size, block)
    theirs = hindsight.occupant(visit.record, visit.row, other, position // at.size, block)
    writer, victim = at.place(token.row, token.position), _victim(at, (visit, position))
    first: dict[str, Any] = {"writer": writer, "victim": victim, "slot": token.slot}
    stale = mine or theirs
    if stale is None or (mine and theirs):
        return at.open((frozenset((one, other)),), "double_owner", detail={"block": block, "of": other}, **first)
    index = (token.position if mine else position) // at.size
    if not mine:
        first |= {"writer": victim, "victim": None}
    detail = {"block": block, "index": index, "of": stale[0], "of_step": stale[1]}
    return at.open((one if mine else other,), "stale_table", detail=detail, **first)
