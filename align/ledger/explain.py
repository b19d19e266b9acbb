"""From wrongs to findings of path A, with evidence that can be followed by hand.

The evidence shows the block in question before and after, one line per offset with owner and position; the formula that
was expected, with its numbers; and what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from align.checkpoints.table import kinds
from align.findings import Finding, told
from align.ledger.at import OF_READS
from align.ledger.evidence import batch_rows, block_rows, computed, contradiction, followed, place_told, tables
from align.ledger.record.types import NONE
from align.ledger.table import checks
from align.ledger.wrong import Place, Wrong
from align.sentences import Said, said

#: The checkpoint that path A's findings stand at.
_SLOTS = "attn.kv_start_indices"
#: Kinds that are wrong in themselves, whatever the cache holds.
_ARGUMENTS = (
    "index_count",
    "index_dtype",
    "table_shape",
    "reader_block_size",
    "wrong_q_len",
    "not_cumulative",
    "dirty_cache",
)
#: How many further wrongs of one kind a finding lists.
LISTED = 16


def findings(
    wrongs: Sequence[Wrong],
    side: str | None = None,
    recorded: int | None = None,
    dp_of: Mapping[int, int] | None = None,
) -> list[Finding]:
    """One finding per kind, the first in time first.

    Args:
        side: ``candidate`` or ``reference``: whose cache it was.
        recorded: the run that everything else was recorded of. A kind that it shows is told by what it shows; kinds
            that other runs alone show come last, and say so. ``None``: all runs alike.
        dp_of: data-parallel rank by rank, where there are several groups: a finding then says which.
    """
    groups: dict[str, list[Wrong]] = {}
    ordered = sorted(wrongs, key=lambda one: (one.run, one.step, one.layer, one.rank))
    for wrong in ordered:
        if recorded is None or recorded in wrong.runs:
            groups.setdefault(wrong.kind, []).append(wrong)
    for group in groups.values():  # what an earlier run left may show in it as well: its own fault tells more
        group.sort(key=lambda one: recorded is not None and one.run != recorded)
    here = len(groups)
    runs: dict[str, set[int]] = {}
    for wrong in ordered:
        runs.setdefault(wrong.kind, set()).update(wrong.runs or (wrong.run,))
        if wrong.kind not in list(groups)[:here]:
            groups.setdefault(wrong.kind, []).append(wrong)
    return [
        _finding(group, side, sorted(runs[kind]), recorded, at >= here, dp_of or {})
        for at, (kind, group) in enumerate(groups.items())
    ]


def _finding(
    group: Sequence[Wrong],
    side: str | None,
    runs: Sequence[int],
    recorded: int | None,
    elsewhere: bool,
    dp_of: Mapping[int, int],
) -> Finding:
    first, check = group[0], checks()[group[0].kind]
    what_is_wrong = _whole(first)
    dp_ranks = sorted({dp_of[wrong.rank] for wrong in group if wrong.rank in dp_of})
    if dp_ranks:
        what_is_wrong = said("ledger.in_group", fault=what_is_wrong, groups=dp_ranks)
    if elsewhere:
        what_is_wrong = said("ledger.elsewhere", fault=what_is_wrong, runs=list(runs), recorded=recorded)
    phases = list(dict.fromkeys(phase for wrong in group for phase in wrong.phases))
    requests = dict.fromkeys(one for wrong in group for one in (*_names(wrong.victim), *wrong.requests))
    positions = [] if first.victim is None or first.victim.position < 0 else [first.victim.position]
    evidence: dict[str, Any] = {
        **told(what_is_wrong),
        "fault": first.kind,
        "formula": check.formula,
        "computed": computed(first),
        "followed": followed(first),
        "contradiction": contradiction(first),
        "tables": tables(first),
        "batch": batch_rows(first),
        "batch_total": len(first.batch),
        "seen": first.slot if first.slot != NONE else first.detail.get("seen"),
        "expected": first.expected if first.expected != NONE else first.detail.get("expected"),
        "writer": _plain(first.writer),
        "victim": _plain(first.victim),
        "first_read": None if first.first_read is None else {**asdict(first.first_read), "layer": first.read_layer},
        "block": None if first.page is None else block_rows(first.page, first.slot),
        "home": None if first.home is None else block_rows(first.home, first.expected),
        "doubted": "" if first.page is None else first.page.doubted,
        "detail": dict(first.detail),
        "call": first.call,
        "made": first.made,
        "handed_to": "attention" if first.kind in OF_READS else "write",
        "run": first.run,
        "recorded_run": recorded,
        "other_runs": [run for run in runs if run != recorded] if recorded is not None else [],
        "elsewhere": elsewhere,
        "harmed": {} if elsewhere else _reach(group),
        "scope": {
            "phases": phases,
            "steps": sorted({step for wrong in group for step in wrong.steps}),
            "layers": sorted({layer for wrong in group for layer in wrong.layers}),
            "layers_of": first.layers_of,
            "ranks": sorted({wrong.rank for wrong in group}),
            **({"dp_ranks": dp_ranks} if dp_ranks else {}),
            "requests": list(requests),
            **{name: sum(getattr(wrong, name) for wrong in group) for name in ("written", "missed", "handed")},
            "holds": check.scope,
        },
        "rows": list(check.rows),
    }
    others = [
        {"writer": _plain(wrong.writer), "victim": _plain(wrong.victim), "step": wrong.step} for wrong in group[1:]
    ]
    if others:
        evidence |= {"further": others[:LISTED], "further_total": len(others)}
    what = "block table and lengths" if first.kind in OF_READS else "slots"
    where = (f", at {first.made}" if first.made else "") + (f"; they are used at {first.call}" if first.call else "")
    return Finding(
        "A",
        "slots",
        side=side,
        checkpoint=kinds()[_SLOTS].at(max(0, first.layer)),
        layer=max(0, first.layer),
        phase=phases[0] if len(phases) == 1 else None,
        step=first.step,
        requests=tuple(requests),
        positions=tuple(positions),
        ranks=tuple(sorted({wrong.rank for wrong in group})),
        evidence=evidence,
        next=f"see how the {side or 'engine'} makes the {what} of step {first.step}{where}; what must hold: "
        f"{check.formula}",
    )


def _reach(group: Sequence[Wrong]) -> dict[str, dict[str, int]]:
    """Request → layer and position of the query from which on its attention is wrong."""
    found: dict[str, dict[str, int]] = {}
    for wrong in group:
        for request, (layer, position) in wrong.reach.items():
            before = found.setdefault(request, {"layer": layer, "position": position})
            found[request] = {"layer": min(before["layer"], layer), "position": min(before["position"], position)}
    return found


def sentence(wrong: Wrong) -> Said:
    """What is wrong, in one sentence."""
    values = {
        **wrong.detail,
        "writer": place_told(wrong.writer, "ledger.no_writer"),
        "victim": place_told(wrong.victim, "ledger.of_nobody"),
        "slot": wrong.slot,
    }
    values.setdefault("expected", wrong.expected)
    taken = said("ledger.taken", victim=values["victim"], slot=wrong.slot)
    values["place"] = taken if wrong.detail.get("taken") else ""
    table = "_table" if wrong.kind == "minus_one" and "index" in wrong.detail else ""
    return said(f"ledger.{wrong.kind}{table}", **values)


def _whole(wrong: Wrong) -> Said:
    if wrong.first_read is None and wrong.kind in _ARGUMENTS:
        return sentence(wrong)
    return said("ledger.finding", fault=sentence(wrong), harm=_harm(wrong))


def _harm(wrong: Wrong) -> Said:
    if wrong.first_read is None:
        return said("ledger.no_harm")
    place = place_told(wrong.first_read, "ledger.of_nobody")
    return said("ledger.harm", place=place, step=wrong.first_read.step, layer=wrong.read_layer)


def _names(place: Place | None) -> list[str]:
    return [place.request] if place is not None and place.request else []


def _plain(place: Place | None) -> dict[str, Any] | None:
    return None if place is None else asdict(place)
