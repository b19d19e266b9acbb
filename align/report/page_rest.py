"""Tables of the page that are no finding: tokens, conditions, walk, collectives, arguments, checklists, coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from align.compare.coverage import percent_text
from align.report import arguments, checklists, claims
from align.report.document import View
from align.report.page_numbers import number, row
from align.result.parts import Finding
from align.result.schema import Result
from align.result.tensors import Seen
from align.result.tokens import TokenDifference, TokenRequest

#: Requests with their tokens, tokens of a request, differences, and names that are listed.
REQUESTS, TOKENS, DIFFERENCES, NAMES = 24, 128, 48, 200
_SIDES = ("candidate", "reference")


def tensors_of(result: Result, view: View) -> dict[str, Any] | None:
    """Counts by verdict, and sentences about the comparison."""
    if result.tensors is None:
        return None
    counts = result.tensors.counts
    about = {name: counts.get(name, 0) for name in ("equal", "within", "beyond")}
    rest = counts.get("not observable", 0) + counts.get("not comparable", 0)
    lines = [view.say("verify.tensors", **about, rest=rest, rows=result.tensors.rows)]
    lines += [view.say("verify.two_tests")] if view.two_tests() else []
    estimates = claims.estimates(result)
    lines += [view.say("verify.estimated", **estimates)] if estimates else []
    lines += [
        view.say("verify.surplus", side=f"@side.{side}", rows=rows) for side, rows in result.surplus.items() if rows
    ]
    lines += [view.told(one) for one in result.tensors.routers]
    floor = result.tensors.floor
    if floor is not None:
        lines.append(view.say("risk.floor", name=floor.name, judged=floor.judged, factor=floor.factor))
    return {"lines": lines, "policy": result.tensors.policy}


# ------------------------------------------------------------------------------------------------------------- tokens


def tokens_of(result: Result, view: View) -> dict[str, Any] | None:
    """Every request's ids on both sides, and every difference with its margins."""
    tokens = result.tokens
    if tokens is None:
        return None
    run = tokens.replay or tokens.free
    marks = {(one.request, one.index): one for one in (*run.differences, *tokens.free.differences)}
    ties = {key for key, one in marks.items() if one.near_tie}
    outcomes = [one.outcome for one in tokens.free.requests]
    about = {name: outcomes.count(name) for name in ("equal", "near_tie", "diverged")}

    def plain(key: str, /, **values: Any) -> str:
        return view.words(key, **values)

    return {
        "summary": view.say("verify.tokens", requests=len(outcomes), **about, total=tokens.total),
        "noise": row(plain("page.number_noise"), run.noise, run.cap, plain("page.from_noise"), run.floor),
        "requests": [_request(one, marks, ties, view) for one in tokens.free.requests[:REQUESTS]],
        "more": max(0, len(tokens.free.requests) - REQUESTS),
        "differences": [_difference(one, view) for one in run.differences[:DIFFERENCES]],
        "more_differences": max(0, len(run.differences) - DIFFERENCES),
        "forced": tokens.replay is not None,
    }


def _request(
    one: TokenRequest,
    marks: Mapping[tuple[str, int], TokenDifference],
    ties: set[tuple[str, int]],
    view: View,
) -> dict[str, Any]:
    ids = [one.ids.get(side, []) for side in _SIDES]
    columns = []
    parted = False
    for index in range(min(max(map(len, ids), default=0), TOKENS)):
        both = [str(side[index]) if index < len(side) else "" for side in ids]
        known = (one.request, index) in marks
        if both[0] == both[1]:
            state = "parted" if parted else "same"
        elif parted and not known:
            state = "parted"
        else:
            state = "tie" if (one.request, index) in ties else "different"
            parted = True
        columns.append({"index": index, "candidate": both[0], "reference": both[1], "state": state})
    return {
        "request": one.request,
        "outcome": view.word("outcome", one.outcome),
        "state": one.outcome,
        "equal": one.equal,
        "total": one.total,
        "columns": columns,
        "more": max(0, max(map(len, ids), default=0) - TOKENS),
    }


def _difference(one: TokenDifference, view: View) -> dict[str, Any]:
    return {
        "request": one.request,
        "index": one.index,
        "position": number(one.position),
        "candidate": number(one.candidate_id),
        "reference": number(one.reference_id),
        "candidate_margin": number(one.candidate_margin),
        "reference_margin": number(one.reference_margin),
        "tolerance": number(one.tolerance),
        "tie": one.near_tie,
        "word": view.word("outcome", "near_tie" if one.near_tie else "diverged"),
        "why": view.told(one.told or None, one.why),
        "top": {
            side: " · ".join(f"{chance.id} ({number(chance.logprob)})" for chance in one.top.get(side, []))
            for side in _SIDES
        },
    }


# --------------------------------------------------------------------------------------------------- conditions, walk


def conditions_of(result: Result, view: View) -> dict[str, Any] | None:
    """Those that are not ok, and those that are."""
    if not result.conditions:
        return None
    rows = [
        {
            "name": one.name,
            "requested": _value(one.requested),
            "candidate": _value(one.observed.get("candidate")),
            "reference": _value(one.observed.get("reference")),
            "verdict": one.verdict,
            "word": view.words.word("page_condition", _state(one)),
            "state": _state(one),
            "why": view.told(one.why_told, one.why),
            "where": " · ".join(dict.fromkeys(one.where.values())),
        }
        for one in result.conditions
    ]
    return {
        "bad": [one for one in rows if one["verdict"] != "ok"],
        "ok": [one for one in rows if one["verdict"] == "ok"],
        "total": len(rows),
    }


def _state(one: Any) -> str:
    if one.verdict == "ok":
        return "ok"
    if not one.required:
        return "noted"
    return "allowed" if one.allowed else str(one.verdict)


def _value(value: Any) -> str:
    return "?" if value is None else str(value)


def walk_of(result: Result, view: View) -> dict[str, Any]:
    """The stages with their costs; of one that was entered twice the first has the time of both."""
    seconds = result.timing.seconds
    total = sum(seconds.values())
    seen: set[str] = set()
    steps = []
    start = 0.0
    for one in result.walk:
        took = None if one.stage in seen else seconds.get(one.stage)
        seen.add(one.stage)
        steps.append(
            {
                "stage": view.word("stage", one.stage),
                "state": one.state,
                "state_word": view.word("state", one.state),
                "why": view.walk_why(one),
                "found": view.walk_found(one),
                "seconds": None if took is None else f"{took:.1f}",
                "start": 0.0 if not total else round(100 * start / total, 2),
                "width": 0.0 if not total or took is None else round(max(0.4, 100 * took / total), 2),
            }
        )
        start += took or 0.0
    rungs = [{"directory": name, "seconds": f"{took:.1f}"} for name, took in result.timing.rungs.items()]
    return {"steps": steps, "total": f"{total:.1f}" if total else "", "rungs": rungs}


# ------------------------------------------------------------------------------------------------------ paths A, C, FA


def collectives_of(result: Result, view: View) -> list[dict[str, Any]]:
    """By side: ranks across, collectives down; a rank is right, wrong, not judged, or no member of the group."""
    found = []
    for side, audit in result.collectives.items():
        accusing = [one for one in result.findings if (one.path, one.side) == ("C", side) and one.kind != "collective"]
        members = [*(one.group for one in audit.rows), *(one.ranks for one in accusing)]
        ranks = sorted({rank for group in members for rank in group})
        # A collective that was not made, or is wrong in another way than its result, is a row of its own.
        rows = [_accused(one, ranks, view) for one in accusing]
        for one in audit.rows:
            cells = []
            for rank in ranks:
                if rank not in one.group:
                    state = "absent"
                elif one.wrong and (rank in one.ranks or not one.ranks):
                    state = "wrong"
                elif one.right:
                    state = "right"
                else:
                    state = "open" if one.unseen or one.wrong else "absent"
                cells.append({"state": state, "word": view.words(f"page_rank.{state}")})
            rows.append(
                {
                    "operation": one.operation,
                    "group": ", ".join(map(str, one.group)),
                    "right": one.right,
                    "wrong": one.wrong,
                    "unseen": one.unseen,
                    "cells": cells,
                }
            )
        found.append(
            {
                "side": view.word("side", side),
                "observable": audit.observable,
                "ranks": ranks,
                "rows": rows,
                "records": audit.records,
                "unseen": [view.quoted(one) for one in audit.unseen],
            }
        )
    return found


def _accused(finding: Finding, ranks: Sequence[int], view: View) -> dict[str, Any]:
    """A finding as a row of the matrix."""
    states = ["wrong" if rank in finding.ranks or not finding.ranks else "clear" for rank in ranks]
    return {
        "operation": view.word("kind", finding.kind),
        "group": finding.checkpoint or "–",
        "right": "–",
        "wrong": "–",
        "unseen": "–",
        "cells": [{"state": state, "word": view.words(f"page_rank.{state}")} for state in states],
    }


def ledger_of(result: Result, view: View) -> list[dict[str, Any]]:
    """By side: how much of the cache's indices was looked at, and how many faults of how many."""

    def plain(key: str, /, **values: Any) -> str:
        return view.words(key, **values)

    found = []
    for side, audit in result.ledger.items():
        looked = []
        if audit.looked is not None:
            looked = [
                {"what": plain(f"page_ledger.{name}"), "count": count}
                for name, count in audit.looked.model_dump().items()
                if isinstance(count, int) and view.words.has(f"page_ledger.{name}")
            ]
        found.append(
            {
                "side": view.word("side", side),
                "observable": audit.observable,
                "number": row(
                    plain("page.number_ledger", records=audit.records), audit.faults, 0, plain("page.from_ledger")
                ),
                "looked": looked,
                "unseen": [view.quoted(one) for one in audit.unseen],
            }
        )
    return found


def arguments_of(result: Result, view: View, lang: str) -> dict[str, Any] | None:
    """Rules that have something to say, and a pair of calls of each phase."""
    if not arguments.seen(result):
        return None
    return {
        "rules": [
            {
                "side": view.word("side", side),
                "severity": one.severity,
                "rule": one.rule,
                "operator": one.operator,
                "phase": view.word("phase", one.phase),
                "layers": arguments.ranges(one.layers),
                "calls": one.calls,
                "said": one.said[lang],
                "known": one.known.get(lang, ""),
                "at": one.at[0] if one.at else "",
            }
            for side, one in arguments.rules(result)
        ],
        "more": arguments.more(result),
        "counts": [
            {
                "side": view.word("side", side),
                "calls": one.calls,
                "held": one.held,
                "hidden": len(one.not_observable),
                "errors": sum(each.severity == "ERROR" for each in one.groups),
            }
            for side, one in result.arguments.items()
        ],
        "pairs": [
            {
                "title": view.say(
                    "arguments.beside",
                    phase=f"@phase.{pair.phase}",
                    layers=arguments.ranges(pair.layers),
                    candidate=pair.steps.get("candidate"),
                    reference=pair.steps.get("reference"),
                ),
                "rows": [
                    {
                        "name": one.name,
                        "candidate": one.candidate or "–",
                        "reference": one.reference or "–",
                        "verdict": one.verdict,
                        "word": view.word("argument", one.verdict),
                        "reason": one.reason.get(lang, ""),
                    }
                    for one in pair.rows
                ],
            }
            for pair in arguments.shown(result)
        ],
    }


# ------------------------------------------------------------------------------------------------ checklists, coverage


def checklists_of(result: Result, view: View, lang: str) -> list[dict[str, Any]]:
    """The lists, failed items first."""
    order = ("failed", "not observable", "ok", "not applicable")
    found = []
    for one in result.checklists:
        items = [
            {
                "id": item.id,
                "text": checklists.text(item, lang),
                "state": item.state,
                "word": view.words(checklists.state(one.name, item.state)),
                "what": view.told(item.told, item.what),
                "mend": view.told(item.mend_told, item.mend) if item.mend else "",
                "findings": list(item.findings),
            }
            for item in sorted(one.items, key=lambda item: order.index(item.state))
        ]
        found.append(
            {
                "title": checklists.title(one, lang),
                "about": checklists.about(one, lang),
                "counts": [
                    {"state": state, "word": view.words(checklists.state(one.name, state)), "count": one.counts[state]}
                    for state in order
                ],
                "items": items,
            }
        )
    return found


def coverage_of(result: Result, view: View) -> list[dict[str, Any]]:
    """By side and together: observed of expected, and what was not, with the reason."""
    if result.coverage is None:
        return []
    parts = {name: getattr(result.coverage, name) for name in (*_SIDES, "paired")}
    return [
        {
            "part": view.words(f"page.coverage_{name}"),
            "observed": one.observed,
            "expected": one.expected,
            "percent": percent_text(one.percent),
            "lacking": _lacking(one, view),
        }
        for name, one in parts.items()
    ]


def _lacking(seen: Seen, view: View) -> list[dict[str, str]]:
    names: Sequence[str] = [*seen.missing, *seen.partial][:NAMES]
    return [
        {
            "name": name,
            "state": view.words("page.nowhere" if name in seen.missing else "page.not_everywhere"),
            "why": seen.why.get(name, ""),
        }
        for name in names
    ]
