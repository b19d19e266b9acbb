"""Path C from copies that differ between the ranks of one side: where it begins, on which rank, and what explains it.

A copy that differs although everything it was computed from was alike is an origin; copies behind it are receivers. A
rank whose batch differs (its token ids, positions or the order of its rows) is wrong before anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from align.checkpoints.table import Name, Structure, parse
from align.collectives.explain import of_copies, told_by
from align.collectives.hypotheses import ORDER, Tried
from align.collectives.replicas import BATCH, Replicas, Unequal, judge_replicas
from align.compare.rows import Recorded
from align.compare.tensors import TensorComparison
from align.findings import Finding, told
from align.sentences import said

_LISTED = 16
_FIRST = "embed"


def copies_of(traces: Mapping[str, Recorded]) -> dict[str, Replicas]:
    """By side, what the copies of its ranks say; sides without tensor parallelism are left out."""
    found = {}
    for side, trace in traces.items():
        if trace.structure is not None and trace.structure.tp > 1:
            found[side] = judge_replicas(trace)
    return found


def copies_unseen(copies: Mapping[str, Replicas]) -> list[str]:
    """Notes on copies that could not be held against each other."""
    return [
        f"the {side}'s copies on its ranks are not observable at {len(one.unseen)} checkpoints: {name}: {why}"
        for side, one in copies.items()
        for name, why in list(one.unseen.items())[:1]
    ]


def ranks_apart(
    copies: Mapping[str, Replicas], compared: TensorComparison, traces: Mapping[str, Recorded]
) -> list[Finding]:
    """Where the ranks of a side part, at most one finding of each side."""
    found = []
    for side, replicas in copies.items():
        structure = traces[side].structure
        if structure is None or not replicas.unequal:
            continue
        batch = next((name for name in BATCH if name in replicas.unequal), None)
        if batch is not None:
            found.append(_of_batch(side, batch, replicas))
            continue
        names = [parse(name) for name in replicas.unequal]
        origin = next((name for name in names if not _receives(name, structure, replicas)), None)
        if origin is not None:
            found.append(_of_copies(side, origin, replicas, compared, traces))
    return found


def _receives(name: Name, structure: Structure, replicas: Replicas) -> bool:
    return any(str(one) in replicas.unequal for one in structure.inputs(name))


def _about(side: str, checkpoint: str, layer: int | None, name: str, replicas: Replicas) -> dict[str, Any]:
    apart = replicas.unequal[name]
    first = apart[0]
    phases = {one.phase for one in apart}
    others = [other for other in replicas.unequal if other != name]
    return {
        "side": side,
        "checkpoint": checkpoint,
        "layer": layer,
        "phase": next(iter(phases)) if len(phases) == 1 else None,
        "step": first.step,
        "requests": () if first.row_name is None else (first.row_name[0],),
        "positions": () if first.row_name is None else (first.row_name[1],),
        "ranks": tuple(sorted({one.rank for one in apart})),
        "evidence": {
            "name": name,
            "steps": [one.step for one in apart][:_LISTED],
            "rows": list(first.rows),
            "rows_total": first.rows_total,
            "copies_equal": dict(list(replicas.equal.items())[:_LISTED]),
            **({"others": others[:_LISTED], "others_total": len(others)} if others else {}),
        },
    }


def _of_batch(side: str, name: str, replicas: Replicas) -> Finding:
    first = replicas.unequal[name][0]
    about = _about(side, _FIRST, None, name, replicas)
    if first.order:
        tried: tuple[Tried, ...] = (_ordered(name, first, ORDER),)
    else:
        tried = (Tried(ORDER, "refuted", said("hypothesis.not_order", name=name, rank=first.rank, first=first.first)),)
    what = said("copies.batch", name=name, rank=first.rank, first=first.first, step=first.step)
    about["evidence"] |= told(what)
    return told_by(Finding("C", "unequal_ranks", **about, next=_next(side, name)), tried)


def _ordered(name: str, first: Unequal, kind: str) -> Tried:
    moved = [at for at, source in enumerate(first.order) if at != source]
    what = said(
        "hypothesis.order", name=name, rank=first.rank, first=first.first, moved=len(moved), rows=len(first.order)
    )
    numbers = {"moved": len(moved), "rows": len(first.order), "order": list(first.order)[:_LISTED]}
    return Tried(kind, "fits", what, 0.0, (first.rank,), numbers)


def _of_copies(
    side: str, name: Name, replicas: Replicas, compared: TensorComparison, traces: Mapping[str, Recorded]
) -> Finding:
    first = replicas.unequal[str(name)][0]
    about = _about(side, str(name), name.layer, str(name), replicas)
    inputs = [str(one) for one in _inputs(name, traces[side])]
    what = said(
        "copies.unequal" if not inputs else "copies.unequal_behind",
        name=str(name),
        first=first.first,
        rank=first.rank,
        rows=first.rows_total,
        step=first.step,
        inputs=inputs,
    )
    about["evidence"] |= told(what)
    finding = Finding("C", "unequal_ranks", **about, next=_next(side, str(name)))
    tried: list[Tried] = [_ordered(str(name), first, ORDER)] if first.order else []
    try:
        tried += of_copies(finding, name, side, first.step, compared, traces)
    except (ValueError, RuntimeError) as error:  # one bad record never ends it
        return replace(finding, evidence={**finding.evidence, "hypotheses_why": str(error)})
    return told_by(finding, tried)


def _inputs(name: Name, trace: Recorded) -> Sequence[Name]:
    structure = trace.structure
    assert structure is not None
    return structure.inputs(name)


def _next(side: str, name: str) -> str:
    return f"see what differs between the {side}'s ranks where {name} is computed: its inputs, its weight, its stream"
