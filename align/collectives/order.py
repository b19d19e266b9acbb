"""Ranks that do not make the same collective, as a finding of path C."""

from __future__ import annotations

from typing import Any

from align.checkpoints.table import parse
from align.collectives.record.mismatch import Mismatch
from align.collectives.record.types import CollectiveCall
from align.findings import Finding, told
from align.sentences import Said, said

#: Where a call stands that belongs to no checkpoint: behind them all.
_LAST = (1 << 31, 0)
_NEXT = {
    "": "see why one rank calls it and the other does not",
    "rows": "see where each rank takes its numbers of rows from",
}


def order_finding(mismatch: Mismatch, side: str) -> Finding:
    """What a worker of ``side`` found before it would have waited for ever.

    The checkpoint is that of the call which comes first in the model: one rank has left it out, or another one makes
    it once too often.
    """
    calls = mismatch.calls
    first = min((call for _, call in calls if call is not None), key=_order)
    checkpoint = first.where or None
    sites = [f"{call.site[0]} (rank {rank})" for rank, call in calls if call is not None and call.site]
    sites = sites or ["the code of both ranks"]
    evidence: dict[str, Any] = {
        **told(_sentence(mismatch)),
        "group": list(first.group),
        "group_name": first.group_name,
        "number": first.in_group,
        "differ": list(mismatch.differ),
        "next_calls": [_plain(mismatch, rank, call) for rank, call in calls],
        "agreed": None if mismatch.before is None else _plain(mismatch, mismatch.rank, mismatch.before),
        "run": first.place.generation,
    }
    return Finding(
        "C",
        "order",
        side=side,
        checkpoint=checkpoint,
        layer=_layer(checkpoint),
        step=first.place.step if first.place.step >= 0 else None,
        ranks=tuple(rank for rank, _ in calls),
        evidence=evidence,
        next=f"{_NEXT['rows' if 'rows' in mismatch.differ else '']}: read {' and '.join(sites)}",
    )


def _order(call: CollectiveCall) -> tuple[int, int]:
    try:
        return parse(call.place.inside[-1]).order if call.place.inside else _LAST
    except ValueError:
        return _LAST


def _layer(checkpoint: str | None) -> int | None:
    try:
        return None if checkpoint is None else parse(checkpoint).layer
    except ValueError:
        return None


def _sentence(mismatch: Mismatch) -> Said:
    first = next(call for _, call in mismatch.calls if call is not None)
    before = mismatch.before
    return said(
        "order.what",
        ranks=list(first.group),
        number=first.in_group + 1,
        calls=[_call(mismatch, rank, call) for rank, call in mismatch.calls],
        before="" if before is None else said("order.before", operation=before.operation, place=_place(before)),
    )


def _call(mismatch: Mismatch, rank: int, call: CollectiveCall | None) -> Said:
    if call is None:
        assert mismatch.ended is not None
        return said("order.ended", rank=rank, step=mismatch.ended.step)
    return said(
        "order.call",
        rank=rank,
        operation=call.operation,
        tensors=[f"{call.dtype} {list(shape)}" for shape in call.given[:1]],
        place=_place(call),
        step=call.place.step,
        rows=said("order.rows", sent=list(call.sent), received=list(call.received))
        if "rows" in mismatch.differ
        else "",
        site=said("order.site", site=call.site[0]) if call.site else "",
    )


def _place(call: CollectiveCall) -> Said | str:
    if call.place.inside:
        return said("order.place", checkpoint=call.place.inside[-1])
    return said("order.after", checkpoint=call.place.after) if call.place.after else ""


def _plain(mismatch: Mismatch, rank: int, call: CollectiveCall | None) -> dict[str, Any]:
    """A rank's next call, or where it ended without one."""
    if call is None:
        assert mismatch.ended is not None
        return {"rank": rank, "operation": None, "run": mismatch.ended.generation, "step": mismatch.ended.step}
    return {
        "rank": rank,
        "operation": call.operation,
        "function": call.function,
        "reduce": call.reduce,
        "root": call.root,
        "dtype": call.dtype,
        "shapes": [list(shape) for shape in call.given],
        **({"sent": list(call.sent), "received": list(call.received)} if call.sent else {}),
        "checkpoint": call.where,
        "inside": list(call.place.inside),
        "run": call.place.generation,
        "step": call.place.step,
        "dummy": call.place.dummy,
        "number": call.in_group,
        "site": list(call.site),
    }
