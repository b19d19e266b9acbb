"""Puts a ladder into the result of the run that it belongs to."""

from __future__ import annotations

from align.ladder.types import Conclusion, Ladder, Ran, SelfRan
from align.result.ladder import LadderConclusion, LadderResult, LadderRung, LadderSelf
from align.result.schema import Result
from align.sentences import Said, said, text_of


def with_ladder(result: Result, ladder: Ladder) -> Result:
    """The same result with the ladder, whose conclusion its first finding says, too."""
    about = LadderResult(
        target=str(ladder.target),
        planned=[str(one) for one in ladder.planned],
        rungs=[LadderRung.model_validate(_rung(one)) for one in ladder.ran],
        own=[_own(one) for one in ladder.own],
        conclusion=None if ladder.conclusion is None else _conclusion(ladder.conclusion),
        notes=list(ladder.notes),
    )
    seconds = {one.directory: round(one.seconds, 3) for one in (*ladder.ran, *(own.ran for own in ladder.own))}
    times = {**result.timing.rungs, **{name: taken for name, taken in seconds.items() if name and taken}}
    timing = result.timing.model_copy(update={"rungs": times})
    found = result.model_copy(update={"ladder": about, "timing": timing})
    return found if ladder.conclusion is None else _in_headline(found, ladder.conclusion)


def _in_headline(result: Result, conclusion: Conclusion) -> Result:
    """The first finding says which dimension introduces it."""
    if not result.findings:
        return result
    first = result.findings[0]
    evidence = {
        **first.evidence,
        "ladder": {"state": conclusion.state, "dimension": conclusion.dimension, "sentence": conclusion.said},
    }
    summary = first.summary
    if "ladder" not in first.evidence:
        summary = f"{summary.rstrip('.')}; {conclusion.sentence}."
    told = first.model_copy(update={"evidence": evidence, "summary": summary})
    return result.model_copy(update={"findings": [told, *result.findings[1:]]})


def own_said(own: SelfRan) -> Said:
    """What one engine against itself says."""
    key = {"aligned": "own_aligned", "diverged": "own_diverged"}.get(own.ran.verdict, "own_unknown")
    return said(
        f"ladder.{key}",
        engine=own.engine,
        layout=str(own.ran.layout),
        against=str(own.against),
        **({"why": own.ran.why} if key == "own_unknown" else {}),
    )


def own_text(own: SelfRan) -> str:
    """The same in English."""
    return text_of(own_said(own))


def _rung(ran: Ran) -> dict[str, object]:
    first = ran.headline
    return {
        "layout": str(ran.layout),
        "verdict": ran.verdict,
        "headline": None if first is None else first.summary,
        "fault": None
        if first is None
        else {"path": first.path, "kind": first.kind, "side": first.side, "checkpoint": first.checkpoint},
        "why": ran.why,
        "directory": ran.directory,
        "cause": ran.cause,
    }


def _own(own: SelfRan) -> LadderSelf:
    told = own_said(own)
    return LadderSelf.model_validate(
        {**_rung(own.ran), "side": own.side, "engine": own.engine, "against": str(own.against), "told": told}
    )


def _conclusion(found: Conclusion) -> LadderConclusion:
    return LadderConclusion(
        state=found.state,
        dimension=found.dimension,
        changed=list(found.changed),
        introduced_at=None if found.introduced_at is None else str(found.introduced_at),
        clean_at=None if found.clean_at is None else str(found.clean_at),
        sentence=found.sentence,
        told=found.said,
    )
