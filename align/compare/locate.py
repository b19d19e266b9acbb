"""From what was compared to what is wrong: a pure planner that names origins and never receivers.

An origin is a place whose inputs are right and whose result is not. In order of certainty: inputs that were not asked
for, weights that differ from the checkpoint, cache slots that belong elsewhere, operators that added more than
rounding to their own inputs, and last what only differs between the sides. Each explains what differs behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from align.checkpoints.table import EXPERT_SUM, kinds, parse
from align.collectives.shards import misplaced, shard_findings
from align.compare.added import Added
from align.compare.checkpoint import SLOTS, CheckpointComparison
from align.compare.collective import OPERATOR
from align.compare.histories import InputDifference
from align.compare.indices import LISTED, by_indices, explains, index_findings, placed
from align.compare.tensors import TensorComparison
from align.findings import Finding, told
from align.sentences import Said, raw, said
from align.trace.format import POSITIONS

_END = (1 << 31, 0)


def locate(
    comparison: TensorComparison | None,
    weights_audit: Mapping[str, Sequence[Mapping[str, Any]]],
    tokens_differ: bool,
    ledger: Sequence[Finding] = (),
    apart: Sequence[Finding] = (),
) -> list[Finding]:
    """What is wrong, the headline first; empty if nothing is.

    Args:
        comparison: ``None`` if no tensors were recorded.
        weights_audit: side → records with ``parameter``, ``status``, ``kind``, ``layer``, ``rows``, ``rows_total``,
            ``max_abs``, ``rank`` and ``live`` (the engine's parameter, with its part if it is fused).
        tokens_differ: by more than near-ties.
        ledger: path A of both sides (:mod:`align.ledger`).
        apart: where copies of one side's ranks part (:mod:`align.collectives.apart`).
    """
    found = [] if comparison is None else _inputs(comparison)
    known = [] if comparison is None else [checkpoint.name for checkpoint in comparison.checkpoints]
    found += _weights(weights_audit, known)
    indices = list(ledger) if comparison is None else index_findings(comparison, ledger)
    if comparison is not None:
        operators = _operators(comparison, indices)
        found += sorted([*operators, *_first_apart(apart, [*found, *operators])], key=_order)
    found = placed(found, indices)
    if comparison is not None:
        found += _unexplained(comparison, found)
        found += _nonfinite(comparison, found)
    if tokens_differ and not found:
        found.append(
            Finding(
                "UNLOCATED",
                "tokens",
                evidence=told(said("finding.tokens")),
                next="repeat the case with one request at a time, then with fewer tokens",
            )
        )
    return found + [finding for finding in indices if not explains(finding)]


def _first_apart(apart: Sequence[Finding], known: Sequence[Finding]) -> list[Finding]:
    """Those before which nothing of the same side is known to be wrong: else they are its receivers."""
    return [
        one
        for one in apart
        if not any(
            other.side == one.side and other.checkpoint is not None and _order(other) <= _order(one) for other in known
        )
    ]


def _order(finding: Finding) -> tuple[int, int]:
    return _END if finding.checkpoint is None else parse(finding.checkpoint).order


def _listed(names: Sequence[str]) -> dict[str, Any]:
    return {"others": list(names[:LISTED]), "others_total": len(names)} if names else {}


# ----------------------------------------------------------------------------------------------------------- inputs


def _inputs(comparison: TensorComparison) -> list[Finding]:
    groups: dict[tuple[str, str | None], list[InputDifference]] = defaultdict(list)
    for difference in comparison.pairing.inputs:
        groups[difference.key, difference.side].append(difference)
    return [_input_finding(key, side, group) for (key, side), group in groups.items()]


def _input_finding(key: str, side: str | None, group: Sequence[InputDifference]) -> Finding:
    first = group[0]
    ids = {"candidate": first.candidate, "reference": first.reference}
    sentence = "finding.input" if first.expected is None else "finding.input_asked"
    what = said(sentence, request=first.request, position=first.position, **ids, expected=first.expected)
    return Finding(
        "INPUT",
        key,
        side=side,
        requests=tuple(dict.fromkeys(difference.request for difference in group)),
        positions=tuple(dict.fromkeys(difference.position for difference in group)),
        evidence=told(what),
        next=f"compare what the {side} was asked for with what its model received"
        if side
        else "give both sides the same token ids",
    )


# ---------------------------------------------------------------------------------------------------------- weights


def _weights(audit: Mapping[str, Sequence[Mapping[str, Any]]], known: Sequence[str]) -> list[Finding]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    findings = []
    for side, records in audit.items():
        findings += shard_findings(side, [record for record in records if misplaced(record)])
        for record in records:
            if record["status"] == "differs" and not misplaced(record):
                groups[side, record["kind"]].append(record)
    findings += [_weight_finding(side, kind, group, set(known)) for (side, kind), group in groups.items()]
    return sorted(findings, key=_order)


#: What the audit says of a parameter that holds something known → the sentence.
_HOLDS = {"zeros": "zeros", "its transpose": "transpose", "its own rows in another order": "order"}


def _held(holds: str) -> Said | str:
    """What a wrong parameter holds instead, as a sentence; empty if that is not known."""
    if not holds:
        return ""
    return said(f"finding.holds_{_HOLDS[holds]}") if holds in _HOLDS else said("finding.holds_tensor", tensor=holds)


def _weight_finding(side: str, kind: str, group: Sequence[Mapping[str, Any]], known: set[str]) -> Finding:
    ordered = sorted(group, key=lambda record: (record["layer"] is not None, record["layer"] or 0))
    first = ordered[0]
    same = [record for record in ordered if record["parameter"] == first["parameter"]]
    others = list(dict.fromkeys(record["parameter"] for record in ordered if record["parameter"] != first["parameter"]))
    layer = first["layer"]
    checkpoint = kinds()[kind].at(layer) if kind in kinds() else None
    if f"{checkpoint}_partial" in known:
        checkpoint = f"{checkpoint}_partial"  # the product with this rank's part, before the reduce
    rows = sorted({row for record in same for row in record["rows"]})
    live, holds = first.get("live") or "", first.get("holds") or ""
    what = said(
        "finding.weights",
        parameter=first["parameter"],
        live=said("finding.live", live=live) if live and live != first["parameter"] else "",
        rows_total=first["rows_total"],
        rows=rows[:4],
        more=" …" if len(rows) > 4 else "",
        holds=_held(holds),
    )
    return Finding(
        "B",
        "weights",
        side=side,
        checkpoint=checkpoint,
        layer=layer,
        ranks=tuple(sorted({record["rank"] for record in same})),
        evidence={
            **told(what),
            "parameter": first["parameter"],
            "live": live,
            "rows": rows,
            "rows_total": first["rows_total"],
            "max_abs": max(record["max_abs"] for record in same),
            "holds": holds,
            **({"remark": first["why"]} if first.get("why") else {}),
            **_listed(others),
        },
        next=f"see how the {side} loads {first['parameter']}" + (f": {first['why']}" if first.get("why") else ""),
    )


# -------------------------------------------------------------------------------------------------------- operators


def _operators(comparison: TensorComparison, indices: Sequence[Finding]) -> list[Finding]:
    groups: dict[tuple[str, str], list[tuple[CheckpointComparison, Added]]] = defaultdict(list)
    for checkpoint in comparison.checkpoints:
        for side, added in checkpoint.added.items():
            if added.verdict == "beyond" and not by_indices(side, checkpoint, added, indices):
                groups[side, checkpoint.kind].append((checkpoint, added))
    return [_origin(side, group) for (side, _), group in groups.items()]


def _is_reduce(added: Added) -> bool:
    return added.parts[0].residual.operator in (OPERATOR, EXPERT_SUM)


def _origin(side: str, group: Sequence[tuple[CheckpointComparison, Added]]) -> Finding:
    """The first of a group of operators that add more than rounding; a reduction is communication."""
    checkpoint, added = group[0]
    beyond = added.beyond
    phases = {part.phase for part in beyond}
    residual = beyond[0].residual
    reasons = list(residual.reasons) or [raw(added.why)]
    scope = _scope(added)
    row = residual.row_name
    about: dict[str, Any] = {
        "side": side,
        "checkpoint": checkpoint.name,
        "layer": checkpoint.layer,
        "phase": next(iter(phases)) if len(phases) == 1 else None,
        "requests": () if row is None else (row[0],),
        "positions": () if row is None else (row[1],),
        "ranks": tuple(sorted({part.rank for part in beyond})),
        "evidence": {
            **told(said("operator.finding", operator=residual.operator, reasons=reasons)),
            "operator": residual.operator,
            "ratio": residual.ratio,
            "allowed": residual.allowed,
            "rel_l2_added": residual.rel_l2,
            "rows": scope["rows_of"],
            "channel": residual.channel,
            "worst_by": residual.worst_by,
            "layers": [other.layer for other, _ in group],
            "scope": scope,
            **_listed([other.name for other, _ in group[1:]]),
        },
    }
    if _is_reduce(added):
        between = f"between {checkpoint.name}_partial and {checkpoint.name}"
        if residual.operator == EXPERT_SUM:
            between = f"between the experts' results and {checkpoint.name}"
        look = f"see what the {side} does {between}: the reduce's operator, its group and its stream"
        return Finding("C", "collective", **about, next=look)
    called = f"how the {side} calls {residual.operator} for {checkpoint.name}"
    return Finding("B", "operator", **about, next=f"read {called}: arguments, order, dtype and shape")


def _scope(added: Added) -> dict[str, Any]:
    """Which of the parts that were recomputed show it: phases, ranks, requests and rows, and of how many."""
    judged = [part for part in added.parts if part.residual.verdict != "not observable"]
    beyond = added.beyond
    return {
        "phases": list(dict.fromkeys(part.phase for part in beyond)),
        "phases_of": list(dict.fromkeys(part.phase for part in judged)),
        "ranks": sorted({part.rank for part in beyond}),
        "ranks_of": sorted({part.rank for part in judged}),
        "requests": list(dict.fromkeys(name for part in beyond for name in part.residual.requests)),
        "rows": sum(part.residual.rows_beyond for part in beyond),
        "rows_of": sum(part.residual.rows for part in judged),
    }


# ------------------------------------------------------------------------------------------------------- unexplained


def _unexplained(comparison: TensorComparison, known: Sequence[Finding]) -> list[Finding]:
    """What differs between the sides although its inputs do not, unless something before it explains that."""
    if any(finding.path == "INPUT" and finding.kind == POSITIONS for finding in known):
        return []
    explained = min((_order(finding) for finding in known if finding.checkpoint is not None), default=None)
    by_name = {checkpoint.name: checkpoint for checkpoint in comparison.checkpoints}
    origins = []
    for checkpoint in comparison.checkpoints:
        if checkpoint.verdict != "beyond" or checkpoint.kind == SLOTS:
            continue
        if checkpoint.alike_row is None and _receives(checkpoint, by_name):
            continue
        if explained is not None and checkpoint.kind in kinds() and parse(checkpoint.name).order >= explained:
            continue
        origins.append(checkpoint)
    if not origins:
        return []
    first, others = origins[0], [checkpoint.name for checkpoint in origins[1:]]
    row = first.worst
    agree = said(f"inputs.{first.inputs_state if first.alike_row is None else 'equal_in_row'}")
    what = said("finding.unexplained", name=first.name, why=first.said or raw(first.why), inputs=agree)
    return [
        Finding(
            "B",
            "unexplained",
            side=first.wrong_side,
            checkpoint=first.name if first.kind in kinds() else None,
            layer=first.layer,
            phase=None if row is None else row.phase or None,
            step=None if row is None else row.candidate.step,
            requests=() if row is None else (row.key.request,),
            positions=() if row is None else (row.key.position,),
            evidence={
                **told(what),
                "name": first.name,
                "inputs": dict(first.inputs or ()),
                "inputs_state": first.inputs_state if first.alike_row is None else "equal",
                "added": {side: added.verdict for side, added in first.added.items()},
                **_listed(others),
            },
            next=f"read how the {first.wrong_side} chooses experts from its logits"
            if first.wrong_side
            else f"record the values of {first.name} and of its inputs, and recompute it in float64 on both sides",
        )
    ]


def _nonfinite(comparison: TensorComparison, known: Sequence[Finding]) -> list[Finding]:
    """NaN and infinities that both sides have alike: the sides agree, and nothing that they compute means anything."""
    explained = min((_order(finding) for finding in known if finding.checkpoint is not None), default=None)
    shown = [one for one in comparison.checkpoints if one.nonfinite_row is not None]
    if not shown:
        return []
    first, others = shown[0], [one.name for one in shown[1:]]
    if explained is not None and first.kind in kinds() and parse(first.name).order >= explained:
        return []
    row = first.nonfinite_row
    assert row is not None and first.metrics is not None
    return [
        Finding(
            "B",
            "nonfinite",
            checkpoint=first.name if first.kind in kinds() else None,
            layer=first.layer,
            requests=(row.request,),
            positions=(row.position,),
            evidence={
                **told(said("finding.nonfinite", count=first.metrics.nonfinite, name=first.name)),
                "name": first.name,
                "nonfinite": first.metrics.nonfinite,
                **_listed(others),
            },
            next=f"look at what {first.name} is computed from on either side: its inputs, its weight, and the dtype's "
            "range",
        )
    ]


def _receives(checkpoint: CheckpointComparison, by_name: Mapping[str, CheckpointComparison]) -> bool:
    """Whether the nearest inputs that were compared are beyond: through what was not compared, however far."""
    pending = [name for name, _ in checkpoint.inputs or ()]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        other = by_name[name]
        if other.verdict == "beyond":
            return True
        if not other.compared:
            pending += [further for further, _ in other.inputs or ()]
    return False
