"""Weights that are right and on the wrong rank: a rank that holds another rank's part, or other heads than its own.

The audit of the weights says what a parameter holds that is not its own part. A rank's part of another place is no
damaged weight but a wrong map: path C.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from align.checkpoints.table import kinds, parse
from align.findings import Finding, told
from align.sentences import Said, said

HEAD_MAP, SHARD = "head_map", "shard"
_SHARE = "the share of rank "
_HEADS = ("attn.q", "attn.k", "attn.v")
#: How many names a finding lists.
_LISTED = 16
Record = Mapping[str, Any]


def misplaced(record: Record) -> bool:
    """Whether a parameter that differs holds what belongs to another rank or to other heads."""
    holds = str(record.get("holds") or "")
    other = set(record.get("heads") or ()) != set(record.get("heads_due") or ()) and bool(record.get("heads"))
    return record["status"] == "differs" and (holds.startswith(_SHARE) or other or _expert(record) is not None)


def _expert(record: Record) -> int | None:
    """The expert of another place that an expert's parameter is of, under expert parallelism."""
    found = record.get("expert_held")
    return None if found is None else int(found)


def shard_findings(side: str, records: Sequence[Record]) -> list[Finding]:
    """One finding for the heads of a side, and one for every other kind of parameter, the first layer first.

    Args:
        records: those of :func:`misplaced`, of all ranks.
    """
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups["heads" if record["kind"] in _HEADS else record["kind"]].append(record)
    return [_finding(side, group) for group in groups.values()]


def _finding(side: str, group: Sequence[Record]) -> Finding:
    ordered = sorted(group, key=lambda one: parse(_name(one)).order)
    first = ordered[0]
    layer, ranks = first["layer"], sorted({one["rank"] for one in group})
    here = [one for one in ordered if one["layer"] == layer]
    map_ = _is_map(here)
    if _expert(first) is not None:
        return _of_experts(side, ordered, here, ranks)
    about = said(
        "shard.head_map" if map_ else "shard.share",
        holdings=_each_once(_holding(one) for one in sorted(here, key=lambda one: (one["rank"], _order(one)))),
        layers=len({one["layer"] for one in group}),
    )
    names = list(dict.fromkeys(one["parameter"] for one in ordered))
    evidence: dict[str, Any] = {
        **told(about),
        "parameter": first["parameter"],
        "live": first.get("live") or "",
        "rows_total": sum(one["rows_total"] for one in here),
        "max_abs": max(one["max_abs"] for one in group),
        "holds": {f"rank {one['rank']} {one['kind']}": one.get("holds") or "" for one in here},
        "heads": [
            {"rank": one["rank"], "kind": one["kind"], "held": list(one["heads"]), "due": list(one["heads_due"])}
            for one in here
            if one.get("heads")
        ],
        "layers": sorted({one["layer"] for one in group if one["layer"] is not None}),
        "others": [name for name in names[1:] if name != first["parameter"]][:_LISTED],
        "others_total": len(names) - 1,
    }
    look = (
        f"see how the {side} maps heads to ranks for {first['parameter']}: the loader's rank, the number of key/value "
        "heads and of their replicas"
        if map_
        else f"see for which rank the {side}'s loader takes the part of {first['parameter']}, and whether it splits it"
    )
    where = {"side": side, "checkpoint": _name(first), "layer": layer, "ranks": tuple(ranks)}
    if map_:
        return Finding("C", "head_map", **where, evidence=evidence, next=look)
    return Finding("C", "shard", **where, evidence=evidence, next=look)


def _of_experts(side: str, group: Sequence[Record], here: Sequence[Record], ranks: Sequence[int]) -> Finding:
    """Experts on the wrong places of the ranks that share them."""
    first = group[0]
    pairs = {_number(one): _expert(one) for one in here if _expert(one) is not None}
    holdings = [said("shard.expert", expert=due, held=held) for due, held in list(pairs.items())[:8]]
    about = said("shard.experts", holdings=holdings, layers=len({one["layer"] for one in group}))
    names = list(dict.fromkeys(one["parameter"] for one in group))
    return Finding(
        "C",
        "expert_map",
        side=side,
        checkpoint=_name(first),
        layer=first["layer"],
        ranks=tuple(ranks),
        evidence={
            **told(about),
            "parameter": first["parameter"],
            "live": first.get("live") or "",
            "rows_total": sum(one["rows_total"] for one in here),
            "max_abs": max(one["max_abs"] for one in group),
            "experts": {str(due): held for due, held in pairs.items()},
            "layers": sorted({one["layer"] for one in group if one["layer"] is not None}),
            "others": [name for name in names if name != first["parameter"]][:_LISTED],
            "others_total": len(names) - 1,
        },
        next=f"see how the {side} maps experts to ranks when it loads {first['parameter']}: its expert map, local and "
        "global numbers",
    )


def _number(record: Record) -> int:
    """Of ``….experts.3.up_proj.weight``."""
    return int(str(record["parameter"]).partition(".experts.")[2].partition(".")[0])


def _is_map(here: Sequence[Record]) -> bool:
    """Some of a rank's heads are wrong and others right, or not one rank's: else all of its part is another rank's."""
    if any(one["kind"] not in _HEADS for one in here):
        return False
    wrong: dict[int, set[str]] = defaultdict(set)
    for one in here:
        wrong[one["rank"]].add(one["kind"])
    shares = {str(one.get("holds") or "") for one in here}
    whole = all(found == set(_HEADS) for found in wrong.values()) and all(one.startswith(_SHARE) for one in shares)
    return not whole


def _holding(one: Record) -> Said:
    heads, due = one.get("heads") or (), one.get("heads_due") or ()
    holds = str(one.get("holds") or "")
    kind = one["kind"].rpartition(".")[2]
    if heads:
        return said("shard.heads", rank=one["rank"], kind=kind, held=list(heads), due=list(due))
    return said("shard.of_rank", rank=one["rank"], kind=kind, other=int(holds.removeprefix(_SHARE)))


def _each_once(holdings: Iterable[Said]) -> list[Said]:
    """Experts of a rank have many parameters, of which each says the same."""
    found: list[Said] = []
    for one in holdings:
        if one not in found:
            found.append(one)
    return found


def _order(one: Record) -> int:
    return kinds()[one["kind"]].index


def _name(one: Record) -> str:
    return kinds()[one["kind"]].at(one["layer"])
