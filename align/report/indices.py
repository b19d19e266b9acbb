"""A finding of the ledger for people who do not know the tool: what was expected, who wrote, whose place it was, who
read it first, and the block in question before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from align.report.markdown import Markdown
from align.report.reach import Claim, cut
from align.result.parts import Finding

#: Rows of the block beside the accused one, and rows that changed, that are shown at most.
BESIDE, CHANGED = 3, 12
#: Names that a sentence lists.
_LISTED = 6
Say = Callable[..., Markdown]


def is_fault(finding: Finding) -> bool:
    """Whether the ledger found it: its evidence has all that is told here."""
    return finding.kind == "slots" and "fault" in finding.evidence


def values(finding: Finding, say: Say) -> dict[str, Any]:
    """What fills the sentences of its cause and of what to do next, besides the evidence."""
    evidence = finding.evidence
    return {
        "step": finding.step,
        "places": _mapping(evidence.get("scope")).get("places", 1),
        "what": say("indices.tables" if evidence.get("handed_to") == "attention" else "indices.slots"),
        "call": say("indices.make", call=evidence["call"]) if evidence.get("call") else "",
    }


def lines(finding: Finding, say: Say) -> list[Claim]:
    """One sentence a line, in the order in which they are followed."""
    return list(_lines(finding, say)) if is_fault(finding) else []


def _lines(finding: Finding, say: Say) -> Iterator[Claim]:
    evidence = finding.evidence
    size = len(evidence.get("block") or ())
    yield ("indices.terms" if size else "indices.terms_b"), {"size": size}
    yield "indices.formula", {"formula": evidence["formula"]}
    if evidence.get("computed"):
        yield "indices.computed", {"computed": evidence["computed"]}
    yield from _whose(evidence)
    if evidence.get("seen") is not None and evidence.get("expected") is not None:
        yield "indices.seen", {name: str(evidence[name]) for name in ("seen", "expected")}
    yield _writer(evidence, say)
    victim = _mapping(evidence.get("victim"))
    if victim.get("request"):
        yield "indices.victim", {"request": victim["request"], "position": victim["position"]}
    yield from _harm(evidence, say)
    scope = _mapping(evidence.get("scope"))
    if scope:
        shown = {name: cut(scope[name], _LISTED) for name in ("steps", "layers", "ranks")}
        yield "indices.scope", {**shown, "places": scope["places"]}
    if evidence.get("further_total"):
        named = [_other(one, say) for one in evidence["further"][:_LISTED]]
        yield "indices.others", {"count": evidence["further_total"], "names": _joined(named, say)}
    if evidence.get("elsewhere"):
        yield "indices.elsewhere", {"runs": cut(evidence["other_runs"]), "recorded": evidence["recorded_run"]}
    elif evidence.get("other_runs"):
        yield "indices.runs", {"runs": cut(evidence["other_runs"]), "recorded": evidence["recorded_run"]}


def _whose(evidence: Mapping[str, Any]) -> Iterator[Claim]:
    """Which entry of whose block table the slot is of."""
    tables, victim = _mapping(evidence.get("tables")), _mapping(evidence.get("victim"))
    if not tables or evidence.get("seen") is None:
        return
    about = {"slot": str(evidence["seen"]), "block": tables["block"], "offset": tables["offset"]}
    about |= {"writer": str(tables["writer"])}
    if tables.get("victim"):
        theirs = {"victim": victim.get("request", ""), "theirs": str(tables["victim"]), "entry": tables["entry"]}
        yield "indices.whose_of", {**about, **theirs}
    else:
        yield "indices.whose", about


def _writer(evidence: Mapping[str, Any], say: Say) -> Claim:
    call = say("indices.at", call=evidence["call"]) if evidence.get("call") else ""
    writer = _mapping(evidence.get("writer"))
    if not writer:
        return "indices.nobody", {"call": call}
    about = {name: writer[name] for name in ("step", "row", "rank")}
    if writer["kind"] == "real":
        who = f"{writer['request']} {say('label.position')} {writer['position']}"
        return "indices.writer", {**about, "who": who, "call": call}
    return "indices.padding", {**about, "kind": writer["kind"], "call": call}


def _harm(evidence: Mapping[str, Any], say: Say) -> Iterator[Claim]:
    read = _mapping(evidence.get("first_read"))
    if read:
        yield "indices.read", {name: read[name] for name in ("request", "step", "layer", "position")}
    elif not evidence.get("harmed"):
        yield "indices.unread", {}
    harmed = _mapping(evidence.get("harmed"))
    if harmed:
        named = [say("indices.harm", request=name, position=one["position"]) for name, one in harmed.items()]
        more = [Markdown(f"… ({len(named)})")] if len(named) > _LISTED else []
        yield "indices.harmed", {"names": _joined([*named[:_LISTED], *more], say)}


def _other(one: Mapping[str, Any], say: Say) -> Markdown:
    place = _mapping(one.get("writer")) or _mapping(one.get("victim"))
    who = f"{place['request']} {say('label.position')} {place['position']}" if place.get("request") else "–"
    return say("indices.other", who=who, step=one.get("step"))


def _joined(parts: list[Markdown], say: Say) -> Markdown:
    return Markdown(say("label.list").join(parts))


def block(finding: Finding) -> tuple[int, list[dict[str, Any]], int] | None:
    """``(block, its rows of interest, how many are left out)``: the accused row with its neighbours, and what changed.

    ``None`` if the finding is about no block.
    """
    rows: list[dict[str, Any]] = list(finding.evidence.get("block") or ()) if is_fault(finding) else []
    if not rows:
        return None
    accused = [at for at, row in enumerate(rows) if row["accused"]]
    near = {at for one in accused for at in range(one - BESIDE, one + BESIDE + 1)}
    changed = [at for at, row in enumerate(rows) if row["before"] != row["after"]][:CHANGED]
    chosen = sorted({*near, *changed} & set(range(len(rows)))) or list(range(min(len(rows), CHANGED)))
    return rows[0]["slot"] // len(rows), [rows[at] for at in chosen], len(rows) - len(chosen)


def names_runs(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a request of another run stands in a row."""
    return any("(run " in row[when] for row in rows for when in ("before", "after"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
