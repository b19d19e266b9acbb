"""The walk: the stages of a run in order, why each was made, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from align.ledger.sides import Audited
from align.report.words import words_of
from align.result.ground import Ground
from align.result.parts import WalkStep
from align.result.tokens import first_difference
from align.run.report import Move, Report
from align.sentences import Said, raw, said

#: What a joint run does, unless it ends before.
PLAN = ("launch", "conditions", "generate", "generate again", "tokens", "record", "compare")
_TOKENS_ALONE = ("launch", "conditions", "generate", "generate again", "tokens")
#: Names that a sentence lists.
_LISTED = 4


def walk_of(report: Report, ground: Ground, tensors: bool = True) -> list[WalkStep]:
    """Every stage that was entered, and behind the one that ended the comparison those that were not reached.

    Args:
        tensors: whether the run was to record any.
    """
    steps: list[WalkStep] = []
    seen: set[str] = set()
    for move in report.moves:
        again = move.stage in seen
        seen.add(move.stage)
        steps.append(_step(move.stage, move, report, ground, again))
        if move.stage == "generate again" and "free" in report.comparisons:
            # Not timed: it takes no time, but it decides.
            seen.add("tokens")
            steps.append(_step("tokens", move, report, ground, False))
    if report.reason and steps:
        steps[-1] = steps[-1].model_copy(update={"state": "stopped"})
    if report.reason and ground.source == "run":
        words = words_of("en")
        steps += [
            WalkStep(stage=stage, state="not reached", why=words(f"why.{stage}"))
            for stage in (PLAN if tensors else _TOKENS_ALONE)
            if stage not in seen
        ]
    return steps


def _step(stage: str, move: Move, report: Report, ground: Ground, again: bool) -> WalkStep:
    words = words_of("en")
    about = _about(stage, move, report, ground)
    why = f"why.{stage} twice"
    return WalkStep(
        stage=stage,
        state="done",
        why=words(why if again and words.has(why) else f"why.{stage}"),
        found=words(found_key(stage, about), **about) if about else "",
        about={**about, **({"again": True} if again else {})},
    )


def found_key(stage: str, about: Mapping[str, Any]) -> str:
    """Key of the sentence that ``about`` fills."""
    return f"found.{stage} later" if "later" in about else f"found.{stage}"


def _about(stage: str, move: Move, report: Report, ground: Ground) -> dict[str, Any]:
    """What ``found.STAGE`` is filled with; empty if nothing was found."""
    if stage == "launch":
        if not ground.versions:
            return {}
        return {"engines": said("list.comma", parts=[_engine(ground, side) for side in ground.versions])}
    if stage == "conditions":
        if not move.conditions:
            return {}
        rest = [one.name for one in move.conditions if not one.ok]
        # What this stage could not know, and a recording told afterwards.
        known = {one.name for one in report.conditions if one.verdict != "unknown"}
        later = [one.name for one in move.conditions if one.verdict == "unknown" and one.name in known]
        others = [name for name in rest if name not in later]
        about = {"ok": len(move.conditions) - len(rest), "total": len(move.conditions), "others": _names(others)}
        return {**about, "later": _names(later)} if later else about
    if stage == "generate again":
        if not report.stability:
            return {}
        stable = [one for one in report.stability if one.stable]
        noise = [one.noise for one in report.stability if one.noise is not None]
        return {
            "stable": len(stable),
            "sides": len(report.stability),
            "noise": f"{max(noise):.3g}" if noise else "-",
        }
    if stage == "fresh engine" and report.fresh:
        each = [said("residue.repeats" if one.stable else "residue.differs", side=one.side) for one in report.fresh]
        return {"repeats": said("list.semicolon", parts=each)}
    if stage == "generate" and "free" in report.comparisons:
        requests = report.comparisons["free"].requests
        return {"tokens": sum(one.total for one in requests), "requests": len(requests)}
    if stage in ("tokens", "replay"):
        return _tokens(report, "free" if stage == "tokens" else "replay")
    if stage == "record" and report.tensors is not None:
        covered = report.tensors.coverage
        return {side: f"{covered[side].observed} / {covered[side].expected}" for side in ("candidate", "reference")}
    if stage == "audit" and report.ledgers:
        return {"sides": said("list.semicolon", parts=[_audited(*one) for one in report.ledgers.items()])}
    if stage == "compare" and move.tensors is not None:
        counts = [one.verdict for one in move.tensors.checkpoints]
        first = next((one.checkpoint for one in move.findings if one.checkpoint is not None), None)
        found = {verdict: counts.count(verdict) for verdict in ("equal", "within", "beyond")}
        return {**found, "total": len(counts), "findings": len(move.findings), "first": first or "-"}
    if stage == "record alone" and report.alone is not None:
        alone = report.alone
        outcome = said("alone.same")
        if not alone.reproduced:
            found_there = said("alone.nothing") if alone.found is None else raw(alone.found)
            outcome = said("alone.other", found=found_there)
        return {"request": alone.request, "outcome": outcome, "values": _names(list(alone.values))}
    if stage == "diagnose" and report.diagnosis is not None:
        told = report.diagnosis
        fault = told.fits[0].told if told.fits else said("oracle.no_fit")
        return {"checkpoint": told.checkpoint, "why": told.told, "fault": fault}
    if stage == "confirm" and move.transplants:
        last = move.transplants[-1]
        return {"checkpoint": last.checkpoint, "side": last.side, "verdict": last.verdict}
    if stage == "replay routing" and move.tensors is not None and move.tensors.routing is not None:
        hidden = move.tensors.routing
        return {"flips": len(move.tensors.flips), "behind": hidden.behind, "rows": hidden.rows}
    if stage == "record again":
        kept = {name: None for patterns in ground.values.values() for name in patterns}
        return {"values": _names(list(kept))} if kept else {}
    return {}


def _audited(side: str, one: Audited) -> Said:
    if not one.observable:
        return said("ledger.not_audited", side=side)
    return said("ledger.audited", side=side, records=one.records, runs=len(one.runs), faults=one.faults)


def _engine(ground: Ground, side: str) -> Said:
    name = ground.engines.get(side, side)
    return said("measured.engine", side=side, name=f"{name} {ground.versions[side].get(name, '')}".rstrip())


def _tokens(report: Report, mode: str) -> dict[str, Any]:
    compared = report.comparisons.get(mode)
    if compared is None:
        return {}
    outcomes = [request.outcome for request in compared.requests]
    first = first_difference(report.comparisons)
    return {
        "equal": outcomes.count("equal"),
        "near_tie": outcomes.count("near_tie"),
        "diverged": outcomes.count("diverged"),
        "requests": len(outcomes),
        "first": "-" if first is None else f"{first.request} #{first.index}",
    }


def _names(names: list[str]) -> Said | str:
    if not names:
        return "-"
    return said("reach.list", parts=names[:_LISTED] + ([f"… ({len(names)})"] if len(names) > _LISTED else []))
