"""A finding of the ledger for people who do not know the tool: what was expected, who wrote, whose place it was, who
read it first. Its tables are in :mod:`align.report.blocks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from align.report.markdown import Markdown, code
from align.report.reach import Claim, cut
from align.result.parts import Finding

#: Names that a sentence lists.
_LISTED = 6
Say = Callable[..., Markdown]


def is_fault(finding: Finding) -> bool:
    """Whether the ledger found it: its evidence has all that is told here."""
    return finding.kind == "slots" and "fault" in finding.evidence


def values(finding: Finding, say: Say) -> dict[str, Any]:
    """What fills the sentences of its cause and of what to do next, besides the evidence."""
    evidence = finding.evidence
    places = [say(f"indices.{name}_at", place=evidence[name]) for name in ("made", "call") if evidence.get(name)]
    return {
        "step": finding.step,
        "amount": _amount(_mapping(evidence.get("scope")), say),
        "what": say("indices.tables" if evidence.get("handed_to") == "attention" else "indices.slots"),
        "where": Markdown("".join(places)),
        "formula": _formula(evidence["formula"]),
    }


def words(finding: Finding) -> list[Claim]:
    """What the words mean that are used in all of it."""
    if not is_fault(finding):
        return []
    size = len(finding.evidence.get("block") or finding.evidence.get("home") or ())
    return [("indices.terms", {"size": size}) if size else ("indices.terms_b", {}), ("indices.run", {})]


def lines(finding: Finding, say: Say) -> list[Claim]:
    """One sentence a line, in the order in which they are followed."""
    return list(_lines(finding, say)) if is_fault(finding) else []


def _lines(finding: Finding, say: Say) -> Iterator[Claim]:
    evidence = finding.evidence
    yield "indices.formula", {"formula": _formula(evidence["formula"])}
    if evidence.get("computed"):
        yield "indices.computed", {"computed": code(evidence["computed"])}
    if None not in (evidence.get("seen"), evidence.get("expected")) and evidence["seen"] != evidence["expected"]:
        key = "indices.seen_slot" if evidence.get("contradiction") else "indices.seen"
        yield key, {name: str(evidence[name]) for name in ("seen", "expected")}
    followed = _mapping(evidence.get("followed"))
    if followed:
        filled = {**followed, "slot": str(evidence["seen"]), "computed": code(followed["computed"])}
        yield f"indices.follows_{followed['by']}", filled
    yield from _whose(evidence)
    if evidence.get("contradiction"):
        yield "indices.contradiction", {"contradiction": evidence["contradiction"]}
    yield _writer(evidence, say)
    if evidence.get("made"):
        yield "indices.made", {"made": evidence["made"]}
    victim = _mapping(evidence.get("victim"))
    if victim.get("request"):
        yield "indices.victim", {"request": victim["request"], "position": victim["position"]}
    yield from _harm(evidence, say)
    scope = _mapping(evidence.get("scope"))
    if scope:
        yield "indices.amount", {"amount": _amount(scope, say)}
        label = "label.rank" if len(scope["ranks"]) == 1 else "label.ranks"
        ranks = f"{say(label)} {say('label.list').join(cut(scope['ranks'], _LISTED))}"
        yield "indices.scope", {"steps": cut(scope["steps"], _LISTED), "layers": _layers(scope, say), "ranks": ranks}
    if evidence.get("further_total"):
        named = [_other(one, say) for one in evidence["further"][:_LISTED]]
        yield "indices.others", {"count": evidence["further_total"], "names": _joined(named, say)}
    if evidence.get("elsewhere"):
        yield "indices.elsewhere", {"runs": cut(evidence["other_runs"]), "recorded": evidence["recorded_run"]}
    elif evidence.get("other_runs"):
        yield "indices.runs", {"runs": cut(evidence["other_runs"]), "recorded": evidence["recorded_run"]}


def _formula(formula: str) -> str:
    """What must hold, as code where it is a formula and not a sentence."""
    return code(formula) if formula.startswith("slot = ") else formula


def _amount(scope: Mapping[str, Any], say: Say) -> Markdown:
    """How often it shows, each kind of count with its unit."""
    counts = {name: scope.get(name, 0) for name in ("written", "missed", "handed")}
    if not any(counts.values()):  # a result of an earlier version has one number for all
        return say("indices.handed", count=scope.get("places", 1))
    return _joined([say(f"indices.{name}", count=count) for name, count in counts.items() if count], say)


def _layers(scope: Mapping[str, Any], say: Say) -> Markdown:
    """Which layers, and whether these are all."""
    found, total = scope["layers"], scope.get("layers_of")
    if total and len(found) == total > 1:
        return say("indices.all_layers", total=total)
    return say("indices.layers", layers=cut(found, _LISTED))


def _whose(evidence: Mapping[str, Any]) -> Iterator[Claim]:
    """Which entry of whose block table the slot is of."""
    tables, victim = _mapping(evidence.get("tables")), _mapping(evidence.get("victim"))
    if not tables or evidence.get("seen") is None:
        return
    about = {"slot": str(evidence["seen"]), "block": tables["block"], "offset": tables["offset"]}
    about |= {"writer": code(str(tables["writer"]))}
    if tables.get("victim"):
        theirs = {"victim": victim.get("request", ""), "theirs": code(str(tables["victim"])), "entry": tables["entry"]}
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


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
