"""What a finding of path A shows of its first fault, to be recomputed by hand: the formula with its numbers, the
requests with their block tables, and the block before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from align.ledger.at import OF_READS
from align.ledger.record.types import NONE
from align.ledger.wrong import Page, Place, Wrong
from align.sentences import Said, said

#: Rows of the batch that are shown; of more only those of the requests concerned.
_SHOWN = 8


def place_told(place: Place | None, none: str) -> Said:
    """Who it is, in words; ``none``: key of the words for nobody."""
    if place is None:
        return said(none)
    if place.kind == "real":
        return said("ledger.row", request=place.request, position=place.position)
    if place.kind == "padding":
        return said("ledger.padding", row=place.row, step=place.step)
    return said("ledger.dummy", rows=place.kind, step=place.step)


def computed(wrong: Wrong) -> str:
    """The slot formula with its numbers; empty where it is not about a slot of a request."""
    table, size, place = wrong.detail.get("table"), wrong.detail.get("block_size"), wrong.writer
    if not table or not size or place is None or place.position < 0 or wrong.expected == NONE:
        return ""
    return f"slot = {_filled(table, place.position, size, size)}"


def _filled(table: Sequence[int], position: int, size: int, unit: int) -> str:
    """``unit`` is what a block id is multiplied by."""
    index, offset = divmod(position, size)
    formula = f"block_table[{position} // {size}] * {unit} + {position} % {size}"
    return f"{formula} = {table[index]} * {unit} + {offset} = {table[index] * unit + offset}"


def followed(wrong: Wrong) -> dict[str, Any] | None:
    """What the slot that was used follows instead, as ``by`` says: the formula with another request's ``table``, for
    another ``position``, with another block ``size``, or a ``shift`` of the right slot, each of which gives all wrong
    slots of the request; or else whose ``place`` it is. ``None`` if it is nobody's.
    """
    detail, place = wrong.detail, wrong.writer
    table, size, relation = detail.get("table"), detail.get("block_size"), detail.get("relation")
    if not table or not size or place is None or place.position < 0 or wrong.slot < 0:
        return None
    position = place.position
    if wrong.kind == "wrong_block_size" and position // detail["used"] < len(table):
        text = _filled(table, position, detail["used"], detail["unit"])
        return {"by": "size", "used": detail["used"], "computed": text}
    if relation == "table":
        theirs = next((row.table for row in wrong.batch if row.request == detail["of"]), ())
        if position // size < len(theirs):
            return {"by": "table", "of": detail["of"], "computed": _filled(theirs, position, size, size)}
    if relation == "position" and 0 <= (other := position + detail["by"]) < len(table) * size:
        return {"by": "position", "position": other, "computed": _filled(table, other, size, size)}
    if relation == "shift":
        return {"by": "shift", "computed": f"{wrong.expected} {detail['by']:+d} = {wrong.slot}"}
    theirs = detail.get("victim_table", ())
    if detail.get("taken") and wrong.victim is not None and wrong.victim.position // size < len(theirs):
        text = _filled(theirs, wrong.victim.position, size, size)
        return {"by": "place", "of": wrong.victim.request, "position": wrong.victim.position, "computed": text}
    return None


def contradiction(wrong: Wrong) -> Said | None:
    """Which two things cannot both be true; ``None`` where no slot stands against another."""
    if NONE in (wrong.slot, wrong.expected) or wrong.slot == wrong.expected:
        return None
    victim = place_told(wrong.victim, "ledger.of_nobody")
    values = {"slot": wrong.slot, "expected": wrong.expected, "victim": victim}
    if wrong.kind in OF_READS:
        return None if wrong.victim is None else said("ledger.contradiction_read", **values)
    if wrong.writer is None:
        return None
    key = "contradiction_taken" if wrong.detail.get("taken") else "contradiction"
    return said(f"ledger.{key}", writer=place_told(wrong.writer, "ledger.no_writer"), **values)


def tables(wrong: Wrong) -> dict[str, Any] | None:
    """The block tables of writer and victim in a step that wrote to another's slot, and which entry the slot is of."""
    table, size, victim = wrong.detail.get("table"), wrong.detail.get("block_size"), wrong.victim
    theirs = wrong.detail.get("victim_table")
    if not table or not size or wrong.writer is None or wrong.slot < 0:
        return None
    block, offset = divmod(wrong.slot, size)
    found: dict[str, Any] = {"writer": list(table), "block": block, "offset": offset, "victim": None, "entry": None}
    if theirs and victim is not None and block in theirs:
        found |= {"victim": list(theirs), "entry": list(theirs).index(block)}
    return found


def batch_rows(wrong: Wrong) -> list[dict[str, Any]]:
    """The requests of the step, as they stood in the batch."""
    rows = wrong.batch
    if len(rows) > _SHOWN:
        places = (wrong.writer, wrong.victim, wrong.first_read)
        names = {place.request for place in places if place is not None} | {str(wrong.detail.get("of", ""))}
        rows = tuple(row for row in rows if row.request in names)[:_SHOWN]
    return [{**asdict(row), "table": list(row.table)} for row in rows]


def block_rows(page: Page, slot: int = NONE) -> list[dict[str, Any]]:
    """The block before and after, one row per offset, and what the block tables say of it.

    ``accused`` marks the slot in question, ``lost`` those where a token that is needed is not.
    """
    size = len(page.before)
    return [
        {
            "slot": page.block * size + offset,
            "offset": offset,
            "should": [asdict(one) for one in page.should[offset]] if page.should else [],
            "before": _cell(before),
            "after": _cell(after),
            "lost": offset in page.lost,
            "accused": page.block * size + offset == slot,
        }
        for offset, (before, after) in enumerate(zip(page.before, page.after, strict=True))
    ]


def _cell(owner: tuple[str, int]) -> str:
    name, position = owner
    if not name:
        return "–"
    return name if position < 0 else f"{name} position {position}"
