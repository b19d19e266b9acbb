"""What a result lets one say was checked, was not, and remains a risk: sentences by key, with what fills them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from align.compare.coverage import percent_text
from align.report.reach import Claim, cut, onset_of
from align.result.collectives import CollectivesAudit
from align.result.parts import Condition
from align.result.schema import Result
from align.sentences import raw, said

#: Names that a sentence lists.
LISTED = 6
#: Share of the channels from which on they are counted and not listed.
_MOST = 0.5
_SIDES = ("candidate", "reference")


def names(found: Sequence[str], limit: int = LISTED, between: str = ", ") -> str:
    """The first names, and how many there are if that is more."""
    return between.join(found[:limit]) + (f"{between}… ({len(found)})" if len(found) > limit else "")


def nothing_compared(result: Result) -> bool:
    """Whether the command ended before anything of the two sides was compared."""
    return result.tokens is None and result.tensors is None


def lacks(result: Result) -> tuple[str, ...]:
    """What the model is known not to have: ``experts``, where its checkpoints were compared and none is of them."""
    cells = [] if result.tensors is None else result.tensors.cells
    return ("experts",) if cells and not any(one.kind.startswith("moe.") for one in cells) else ()


def symptom(result: Result) -> list[Claim]:
    """What it looks like, where the seeds' tables would look, and where it was found."""
    seen = result.symptom
    if seen is None or not seen.names:
        return []
    names_ = said("list.semicolon", parts=seen.names_told or [raw(one) for one in seen.names])
    found: list[Claim] = [("symptom.names", {"names": names_})]
    found += [
        ("symptom.row", {"row": one.row, "why": one.told or raw(one.why)}) for one in seen.rows if one.state == "shown"
    ]
    paths = {"suggested": seen.suggested, "found": seen.found}
    if seen.agree is not None:
        found.append(("symptom.agree" if seen.agree else "symptom.disagree", paths))
    elif seen.suggested:
        found.append(("symptom.unlocated", paths))
    hidden = [one.row for one in seen.rows if one.state == "not observable"]
    if hidden and result.verdict != "aligned":
        found.append(("symptom.hidden", {"rows": hidden}))
    return found


def checked(result: Result) -> list[Claim]:
    """What was looked at and found as it must be, with how much of it there was."""
    return list(_checked(result))


def _checked(result: Result) -> Iterator[Claim]:
    if result.conditions:
        ok = sum(one.verdict == "ok" for one in result.conditions)
        yield "check.conditions", {"ok": ok, "total": len(result.conditions)}
    for side in result.stability:
        if side.stable:
            noise = "@label.not_known" if side.noise is None else side.noise
            about = {"side": f"@side.{side.side}", "tokens": side.tokens, "noise": noise, "near_ties": side.near_ties}
            yield ("check.stability ties" if side.near_ties else "check.stability"), about
    if result.tokens is not None:
        yield "check.tokens", {"total": result.tokens.total, "requests": len(result.tokens.free.requests)}
    if result.coverage is not None and result.tensors is not None:
        paired = result.coverage.paired
        yield (
            "check.tensors",
            {
                "observed": paired.observed,
                "expected": paired.expected,
                "percent": percent_text(paired.percent),
                "rows": result.tensors.rows,
            },
        )
    for name, audit in result.weights.items():
        total = audit.equal + audit.differs + len(audit.not_observable)
        yield "check.weights", {"side": f"@side.{name}", "equal": audit.equal, "total": total}
    for name, ledger in result.ledger.items():
        if ledger.observable and not ledger.faults:
            about = {"records": ledger.records, "runs": len(ledger.runs)}
            yield "check.ledger", {"side": f"@side.{name}", **about}
    for name, calls in result.collectives.items():
        judged = sum(row.right for row in calls.rows)
        if calls.observable and not calls.faults and judged:
            yield "check.collectives", {"side": f"@side.{name}", "count": judged, "rows": _calls_of(calls)}
    yield from _of_arguments(result)


def _of_arguments(result: Result) -> Iterator[Claim]:
    for name, audit in result.arguments.items():
        if audit.observable and not any(one.severity == "ERROR" for one in audit.groups):
            about = {"calls": audit.calls, "held": audit.held, "phases": audit.phases}
            yield "check.arguments", {"side": f"@side.{name}", **about}


def _layouts(result: Result) -> list[str]:
    """Those that were compared, the run's own first."""
    assert result.case is not None
    rungs = [] if result.ladder is None else result.ladder.rungs
    return list(dict.fromkeys([result.case.layout, *(one.layout for one in rungs if one.verdict != "not comparable")]))


def unchecked(result: Result) -> list[Claim]:
    """What nobody looked at. Nothing of it is a pass."""
    return list(_unchecked(result))


def _unchecked(result: Result) -> Iterator[Claim]:
    unknown = [one.name for one in result.conditions if one.verdict == "unknown"]
    if unknown:
        yield "uncheck.conditions", {"count": len(unknown), "names": unknown}
    if not result.conditions:
        yield "uncheck.no_conditions", {}
    if not result.stability:
        yield "uncheck.no_stability", {}
    for side in result.stability:
        if not side.stable:
            first = side.first or {}
            known = {"request", "index", "first", "second"} <= first.keys()
            yield ("uncheck.stability first" if known else "uncheck.stability"), {**first, "side": f"@side.{side.side}"}
    if result.tokens is None:
        yield "uncheck.tokens", {}
    if result.coverage is None:
        yield ("uncheck.no_tensors" if nothing_compared(result) else "uncheck.tensors"), {}
    else:
        for part in _SIDES:
            seen = getattr(result.coverage, part)
            lacking = [*seen.missing, *seen.partial]
            if lacking:
                yield "uncheck.missing", {"part": f"@side.{part}", "count": len(lacking), "names": lacking}
        paired = [*result.coverage.paired.missing, *result.coverage.paired.partial]
        if paired:
            yield "uncheck.compared", {"count": len(paired), "names": paired}
    estimated = estimates(result)
    if estimated is not None:
        yield "uncheck.estimated", estimated
    for name in _SIDES:
        audit = result.weights.get(name)
        if audit is None:
            yield "uncheck.no_weights", {"side": f"@side.{name}"}
        elif audit.not_observable:
            hidden = audit.not_observable
            yield "uncheck.weights", {"side": f"@side.{name}", "count": len(hidden), "names": hidden}
    for name in _SIDES:
        ledger = result.ledger.get(name)
        if ledger is None:
            yield "uncheck.no_ledger", {"side": f"@side.{name}"}
        for why in () if ledger is None else ledger.unseen:
            yield "uncheck.ledger", {"side": f"@side.{name}", "why": raw(why)}
    for name, calls in result.collectives.items():
        for why in calls.unseen:
            yield "uncheck.collectives", {"side": f"@side.{name}", "why": raw(why)}
    for name in _SIDES:
        arguments = result.arguments.get(name)
        if arguments is None:
            yield "uncheck.no_arguments", {"side": f"@side.{name}"}
        for why in () if arguments is None else arguments.unseen:
            yield "uncheck.arguments", {"side": f"@side.{name}", "why": raw(why)}
        rules = [] if arguments is None else list(arguments.not_observable)
        if rules:
            yield "uncheck.argument_rules", {"side": f"@side.{name}", "count": len(rules), "names": rules}
    if result.case is not None:
        case = result.case
        requests, tokens = len(case.requests), case.max_new_tokens
        yield "uncheck.layouts", {"layout": _layouts(result), "requests": requests, "tokens": tokens}
    yield "uncheck.modes", {}


def _calls_of(audit: CollectivesAudit) -> list[str]:
    """``64 all_reduce of ranks 0, 1`` for each operation and group."""
    return [f"{row.right} {row.operation} ({', '.join(map(str, row.group))})" for row in audit.rows if row.right]


def estimates(result: Result) -> dict[str, Any] | None:
    """How many checkpoints were compared by digests, and of how many rows; ``None`` if none were."""
    tensors = result.tensors
    if tensors is None or not tensors.estimated:
        return None
    about = {"count": tensors.estimated, "rows": tensors.estimated_rows, "all": tensors.rows}
    return {**about, "total": sum(tensors.counts.values())}


def risks(result: Result) -> list[Claim]:
    """What may still be wrong."""
    return list(_risks(result))


def _risks(result: Result) -> Iterator[Claim]:
    if result.verdict == "not comparable":
        yield "risk.stopped", {}
    if result.simulated and not nothing_compared(result):
        yield "risk.simulated", {}
    for condition in result.conditions:
        if condition.required and condition.allowed and condition.verdict != "ok":
            yield _allowed(condition)
    noted = [one.name for one in result.conditions if not one.required and one.verdict != "ok"]
    if noted:
        yield "risk.noted", {"names": noted}
    if result.coverage is None and result.tokens is not None:
        yield "risk.tokens_only", {}
    if result.coverage is not None and result.coverage.paired.observed < result.coverage.paired.expected:
        yield "risk.coverage", {"percent": percent_text(result.coverage.paired.percent)}
    if result.tokens is not None:
        run = result.tokens.replay or result.tokens.free
        if run.noise_above_cap:
            yield "risk.noise", {"noise": run.noise, "cap": run.cap}
        ties = sum(one.near_tie for one in run.differences)
        if ties:
            yield ("risk.near_ties found" if result.findings else "risk.near_ties"), {"count": ties}
    if result.findings:
        yield "risk.hidden", {}
    if result.tensors is not None:
        routing = result.tensors.routing
        if routing is not None and routing.behind:
            yield "risk.routers", {"behind": routing.behind, "rows": routing.rows}
        floor = result.tensors.floor
        if result.tensors.policy != "derived":
            yield "risk.seed_policy", {}
        elif floor is None:
            yield "risk.bounds", {}
        else:
            yield "risk.floor", {"name": floor.name, "judged": floor.judged, "factor": floor.factor}
            if floor.simulated:
                yield "risk.floor_simulated", {}
    if result.measures and not nothing_compared(result):
        yield "risk.measures", {}


def _allowed(condition: Condition) -> Claim:
    """A condition that does not hold, and what that may mean for the verdict."""
    seen = {side: condition.observed.get(side) for side in _SIDES}
    shown = {side: "@label.not_known" if value is None else str(value) for side, value in seen.items()}
    about = {"name": condition.name, "requested": str(condition.requested), **shown}
    alike = seen["candidate"] is not None and seen["candidate"] == seen["reference"]
    return ("risk.allowed alike" if alike else "risk.allowed"), about


def walked(result: Result, lang: str) -> list[Claim]:
    """What was tried after the first finding, and what came of it."""
    return list(_walked(result, lang))


def _walked(result: Result, lang: str) -> Iterator[Claim]:
    onset = next((stage for one in result.findings if (stage := onset_of(one)) is not None), None)
    if onset is not None:
        yield f"walked.onset {onset}", {}
    if result.alone is not None:
        alone = result.alone
        if alone.reproduced:
            yield "walked.alone", {"request": alone.request, "checkpoint": alone.checkpoint}
        else:
            found_there = "@walked.nothing" if alone.found is None else raw(alone.found)
            yield "walked.batched", {"request": alone.request, "found": found_there}
            if alone.pair is not None and alone.pair.requests:
                yield "walked.pair", {"one": alone.pair.requests[0], "other": alone.pair.requests[1]}
            elif alone.pair is not None:
                tried = said("list.comma", parts=alone.pair.tried)
                yield "walked.no_pair", {"request": alone.request, "tried": tried}
        if alone.verified and alone.reproduced:  # else it tells of a run in which nothing was wrong
            states = [said("alone.layer", layer=layer, state=state) for layer, state in alone.verified.items()]
            yield "walked.verified", {"layers": said("list.comma", parts=states[:LISTED])}
    found = result.diagnosis
    if found is not None:
        sides = [
            said("oracle.ratio", side=side, ratio=one.ratio, verdict=one.verdict) for side, one in found.sides.items()
        ]
        yield "walked.oracle", {"why": found.told or raw(found.why), "ratios": said("list.comma", parts=sides)}
        if found.fits:
            first = found.fits[0]
            yield (
                "walked.fault",
                {"sentence": first.sentence[lang].rstrip(".。"), "text": first.told or raw(first.text)},
            )
        if found.channels_total:
            yield _channels(found.channels, found.channels_total, found.channels_of)
        if found.heads:
            yield "walked.heads", {"heads": said("reach.list", parts=cut(found.heads, 2 * LISTED))}


def _channels(found: Sequence[int], total: int, every: int | None) -> Claim:
    """A list says something only while it is short, or most channels are not in it."""
    if every is not None and total == every:
        return "walked.all_channels", {"every": every}
    if (every is not None and total > _MOST * every) or total > len(found):
        return (
            ("walked.most_channels", {"total": total, "every": every})
            if every
            else ("walked.many_channels", {"total": total})
        )
    listed = said("reach.list", parts=cut(found[:total], 2 * LISTED))
    if every is None:
        return "walked.listed_channels", {"channels": listed, "total": total}
    return "walked.channels", {"channels": listed, "total": total, "every": every}
