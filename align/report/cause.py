"""The cause in one sentence: a finding about configuration, weights, inputs or arguments, and what follows from it.

Two findings are joined only where the records join them: one that is wrong at the same operator, an argument that a
finding names as its likely cause, an engine that fails in the operator that it handed a wrong argument. Operators are
judged by their own inputs, so one that is wrong further behind does not follow from a wrong weight before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from align.checkpoints.table import parse
from align.conditions.told import checkpoint_of, explains
from align.report.ending import failed_side
from align.result.parts import Condition, Finding
from align.result.schema import Result
from align.result.scope import layers_of
from align.sentences import Said, raw, said

INPUTS = ("token_ids", "positions")
#: What a fault shows as, where it is not an operator's own error: what is left unexplained between the sides.
_SHOWS = ("unexplained", "nonfinite")
#: Causes and symptoms that the sentence names.
_NAMED = 2


def cause_of(result: Result) -> Said | None:
    """The sentence; ``None`` where nothing joins two records."""
    for root in _roots(result):
        symptoms = list(_symptoms(result, root))
        if symptoms:
            return said("cause.follows", roots=[_configured(result, root)], symptoms=symptoms[:_NAMED])
    return _of_arguments(result) or _of_conditions(result)


def failure_said(result: Result, engine: str) -> Said:
    """That an engine failed, and in what, without its own words."""
    told = (result.reason_told or {}).get("what")
    method = told.get("method") if isinstance(told, dict) else None
    return said("cause.failed_in", engine=engine, method=method) if method else said("cause.failed", engine=engine)


def _roots(result: Result) -> list[Finding]:
    """Findings that name what is set or loaded wrongly; what goes in explains what is set."""
    kinds = (*INPUTS, "configuration", "weights")
    found = [one for one in result.findings if one.kind in kinds and one.side is not None]
    return sorted(found, key=lambda one: one.kind not in INPUTS)


def _symptoms(result: Result, root: Finding) -> Iterator[Said]:
    for other in result.findings:
        if other is root or other.side != root.side or other.kind in (root.kind, "arguments", *INPUTS):
            continue
        if _follows(result, root, other):
            yield _shown(other)
    diagnosed = result.diagnosis
    if (
        root.kind == "weights"
        and diagnosed is not None
        and (diagnosed.checkpoint, diagnosed.side) == (root.checkpoint, root.side)
        and diagnosed.fits
    ):
        fit = diagnosed.fits[0]
        yield said("cause.fit", checkpoint=root.checkpoint, what=fit.told or raw(fit.text))


def _follows(result: Result, root: Finding, other: Finding) -> bool:
    """Whether the records say that one side's finding comes from what is set or loaded there."""
    if root.kind in INPUTS:  # they explain everything
        return other.kind in ("operator", *_SHOWS)
    if root.kind == "configuration":
        return _configures(root, other)
    if other.checkpoint == root.checkpoint:
        return other.kind in ("operator", *_SHOWS)
    return other.kind in _SHOWS and _behind(result, root, other)


def _configures(root: Finding, other: Finding) -> bool:
    """Whether what is set belongs to the operator that is wrong, in this layer as well."""
    if not explains(root.checkpoint, root.side, other) or root.checkpoint is None or other.checkpoint is None:
        return False
    layers = layers_of(root.evidence.get("places", ()))
    its = parse(other.checkpoint)
    if not layers:  # all modules are set so
        return True
    return its.layer in layers and (its.kind is parse(root.checkpoint).kind or other.kind != "operator")


def _behind(result: Result, root: Finding, other: Finding) -> bool:
    """Whether another checkpoint comes later in the model; not where that is not known."""
    names = [] if result.tensors is None else [one.name for one in result.tensors.cells]
    if root.checkpoint in names and other.checkpoint in names:
        return names.index(root.checkpoint) < names.index(other.checkpoint)
    return root.layer is not None and other.layer is not None and root.layer < other.layer


def _of_arguments(result: Result) -> Said | None:
    """Arguments that a finding, or the end of an engine, names as its cause."""
    own = [one for one in result.findings if one.kind == "arguments" and one.side is not None]
    for other in result.findings:
        rules = other.evidence.get("likely_rules") or ()
        named = [one for one in own if one.evidence.get("rule") in rules and one.side in (other.side, None)]
        if named and other.kind != "arguments":
            roots = [_argument(result, one) for one in named[:_NAMED]]
            return said("cause.likely", roots=roots, symptoms=[_shown(other)])
    failed = failed_side(result)
    for one in own:
        if one.side == failed and result.reason_told and str(one.evidence.get("operator")) in result.reason:
            ended = failure_said(result, _engine(result, failed))
            return said("cause.likely", roots=[_argument(result, one)], symptoms=[ended])
    return None


def _of_conditions(result: Result) -> Said | None:
    """A condition that is false on one side, was allowed, and is about the operator that is wrong there."""
    for condition in result.conditions:
        if condition.verdict != "false" or condition.told or len(condition.sides) != 1:
            continue
        (side,) = condition.sides
        checkpoint = checkpoint_of(condition.name, condition.places.get(side, ()))
        shown = [_shown(one) for one in result.findings if explains(checkpoint, side, one)]
        if shown:
            return said("cause.likely", roots=[_condition(condition, side)], symptoms=shown[:_NAMED])
    return None


# -------------------------------------------------------------------------------------------------------- its parts


def _engine(result: Result, side: str | None) -> str:
    return result.engines.get(side or "") or str(side)


def _configured(result: Result, root: Finding) -> Said:
    """What is set or loaded wrongly."""
    engine, evidence = _engine(result, root.side), root.evidence
    if root.kind == "configuration":
        settings = [_setting(one) for one in evidence.get("conditions", ())]
        places = list(evidence.get("places", ()))[:_NAMED]
        more = " …" if len(evidence.get("places", ())) > len(places) else ""
        where = said("cause.where", places=places, more=more) if places else ""
        return said("cause.configuration", engine=engine, settings=settings, where=where)
    if root.kind in INPUTS:
        return said(f"cause.{root.kind}", engine=engine)
    held, parameter = evidence.get("holds"), evidence.get("parameter")
    if not held:
        return said("cause.weights", engine=engine, parameter=parameter)
    for other in result.findings:
        its = (other.kind, other.side, other.evidence.get("parameter"), other.evidence.get("holds"))
        if its == ("weights", root.side, held, parameter):
            return said("cause.swapped", engine=engine, one=parameter, other=held)
    return said("cause.held", engine=engine, parameter=parameter, held=held)


def _setting(one: Any) -> Said:
    """Of what was read in several modules, what is not as it was asked for."""
    asked, seen = one.get("requested"), one.get("observed")
    if isinstance(seen, Sequence) and not isinstance(seen, str) and not isinstance(asked, Sequence):
        seen = [value for value in seen if value != asked]
    return said("cause.setting", name=one.get("condition"), observed=_text(seen), requested=_text(asked))


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _argument(result: Result, one: Finding) -> Said:
    about = {"operator": one.evidence.get("operator"), "rule": one.evidence.get("rule")}
    sentence = one.evidence.get("sentence")
    what = sentence.get("what") if isinstance(sentence, dict) else None
    return said("cause.arguments", engine=_engine(result, one.side), what=what or raw(""), **about)


def _condition(one: Condition, side: str) -> Said:
    asked = {"observed": _text(one.observed.get(side)), "requested": _text(one.requested)}
    return said("cause.condition", name=one.name, side=side, **asked)


def _shown(one: Finding) -> Said:
    if one.path == "A":
        sentence = one.evidence.get("sentence")
        return sentence if isinstance(sentence, dict) else raw(one.summary)
    operator = one.evidence.get("operator")
    if operator:
        return said("cause.operator", operator=operator, checkpoint=one.checkpoint)
    return said("cause.result", checkpoint=one.checkpoint)
