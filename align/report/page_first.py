"""The first screen of the page: the verdict in a sentence, four facts, and why it is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from align.compare.coverage import percent_text
from align.findings import PATHS
from align.knowledge import PATHS_ZH
from align.report import claims, ending, indices
from align.report.cause import failure_said
from align.report.document import View
from align.report.markdown import Markdown, escape
from align.result.parts import Finding
from align.result.schema import Result
from align.sentences import raw, said

#: Characters that a tile's note may have.
_NOTE = 120


def sentence_of(result: Result, view: View) -> str:
    """The verdict in one sentence: path, side, origin and kind."""
    if not result.findings and result.verdict == "aligned":
        model = view.say("lead.unknown") if result.case is None else result.case.model
        about = {side: _engine(result, view, side) for side in ("candidate", "reference")}
        return view.say("page.sentence_aligned", **about, model=model)
    if not result.findings:
        return view.reason() if result.reason else ""
    first = result.findings[0]
    failed = ending.failed_side(result)
    if failed is not None and result.reason:
        return view.say("page.sentence_failed", what=view.told(failure_said(result, _engine(result, view, failed))))
    if ending.not_finite(result):
        about = {"side": _engine(result, view, first.side), "checkpoint": first.checkpoint or "-"}
        return view.say("page.sentence_not_finite", **about)
    if first.side is None:
        key = "page.sentence_two" if first.checkpoint else "page.sentence_unlocated"
    else:
        key = "page.sentence" if first.checkpoint else "page.sentence_nowhere"
    return view.say(
        key,
        path=view.path(first),
        side=_engine(result, view, first.side),
        checkpoint=first.checkpoint or "-",
        kind=_kind(view, first),
    )


def _kind(view: View, finding: Finding) -> str:
    """With the operator's name, where one is accused."""
    kind, operator = view.word("kind", finding.kind), finding.evidence.get("operator")
    if finding.path == "B" and operator:
        return view.say("page.kind_operator", kind=kind, operator=operator)
    return kind


def _engine(result: Result, view: View, side: str | None) -> str:
    if side is None:
        return view.say("side.both")
    name = result.engines.get(side)
    return view.say("page.engine", engine=name, side=view.word("side", side)) if name else view.word("side", side)


def tiles_of(result: Result, view: View, lang: str) -> list[dict[str, str]]:
    """Four facts that a stranger must see first."""
    if not result.findings:
        return _clean(result, view)
    first = result.findings[0]
    note, kind = "", _kind(view, first)
    if result.diagnosis is not None and result.diagnosis.fits and result.diagnosis.checkpoint == first.checkpoint:
        fit = result.diagnosis.fits[0]
        kind = fit.sentence[lang].rstrip(".。")
        text = view.told(fit.told or raw(fit.text))
        if fit.explains and len(text) <= _NOTE:  # often the very number to look for
            note = text
    elif indices.is_fault(first):
        note = escape(first.evidence["fault"])
    elif first.evidence.get("rule"):
        note = escape(first.evidence["rule"])
    path = view.path(first) if len(first.path) > 1 else view.say("page.path", path=first.path)
    places = view.place(first)
    broken = escape((PATHS_ZH if lang == "zh" else PATHS)[first.path]) if len(first.path) == 1 else ""
    return [
        {
            "label": view.say("page.tile_path"),
            "value": escape(path),
            "note": broken,
        },
        {
            "label": view.say("page.tile_side"),
            "value": escape(result.engines.get(first.side or "") or view.word("side", first.side or "both")),
            "note": escape(view.word("side", first.side or "both")),
        },
        {
            "label": view.say("page.tile_origin"),
            "value": escape(first.checkpoint or _layer(view, first)),
            "note": Markdown(f"{view.phase_of(first)}") if first.checkpoint or first.layer is not None else places,
        },
        {"label": view.say("page.tile_kind"), "value": escape(kind), "note": note},
    ]


def _layer(view: View, finding: Finding) -> Markdown:
    """The layer of a finding without a checkpoint, as one of arguments has it."""
    if finding.layer is None:
        return view.say("label.not_known")
    return view.told(said("reach.layer", parts=[str(finding.layer)]))


def _clean(result: Result, view: View) -> list[dict[str, str]]:
    tiles = []
    if result.tokens is not None:
        equal = sum(one.outcome == "equal" for one in result.tokens.free.requests)
        tiles.append(
            {
                "label": view.say("page.tile_tokens"),
                "value": f"{equal} / {len(result.tokens.free.requests)}",
                "note": view.say("page.tile_tokens_note", total=result.tokens.total),
            }
        )
    if result.tensors is not None:
        counts = result.tensors.counts
        good = counts.get("equal", 0) + counts.get("within", 0)
        tiles.append(
            {
                "label": view.say("page.tile_tensors"),
                "value": f"{good} / {sum(counts.values())}",
                "note": view.say("page.tile_tensors_note", equal=counts.get("equal", 0)),
            }
        )
    if result.conditions:
        ok = sum(one.verdict == "ok" for one in result.conditions)
        tiles.append(
            {
                "label": view.say("page.tile_conditions"),
                "value": f"{ok} / {len(result.conditions)}",
                "note": view.say("page.tile_conditions_note"),
            }
        )
    if result.coverage is not None:
        tiles.append(
            {
                "label": view.say("page.tile_coverage"),
                "value": f"{percent_text(result.coverage.paired.percent)} %",
                "note": view.say("page.tile_coverage_note", expected=result.coverage.paired.expected),
            }
        )
    return tiles


def believed_of(result: Result, view: View, lang: str) -> list[dict[str, Any]]:
    """Why the verdict is believed, and what speaks against it: each with a state that has a sign of its own."""
    found: list[dict[str, Any]] = []

    def add(state: str, text: str, parts: Sequence[str] = ()) -> None:
        sign = {"for": "✓", "against": "✗", "open": "?"}[state]
        found.append({"state": state, "sign": sign, "text": text, "parts": list(parts)})

    first = result.findings[0] if result.findings else None
    if first is not None:
        sentence = first.evidence.get("sentence")
        reasons = sentence.get("reasons") if isinstance(sentence, Mapping) else None
        if isinstance(reasons, list) and first.evidence.get("operator"):
            add(
                "for",
                view.say("page.believe_own", operator=first.evidence["operator"]),
                [view.told(one) for one in reasons if isinstance(one, Mapping)],
            )
        else:
            add("for", view.evidence(first))
        inputs = first.evidence.get("inputs_state")
        if inputs in ("equal", "within"):
            add("for", view.say("page.believe_inputs", state=view.word("page_script", f"inputs_{inputs}")))
        if first.evidence.get("likely"):
            add("for", view.say("label.likely", what=view.told(first.evidence["likely"])))
        oracle = result.diagnosis
        if oracle is not None and oracle.checkpoint == first.checkpoint:
            judged = [one.verdict for one in oracle.sides.values()]
            state = "for" if oracle.side is not None and oracle.side == first.side else "open"
            told = _walked(view, claims.walked(result, lang), "oracle")
            add(state if "not observable" not in judged else "open", told)
            if oracle.fits:
                add("for", _walked(view, claims.walked(result, lang), "fault"))
        for transplant in result.transplants:
            state = {"confirmed": "for", "refuted": "against"}.get(str(transplant.get("verdict")), "open")
            add(
                state,
                view.say(
                    "label.transplant",
                    checkpoint=transplant.get("checkpoint"),
                    side=view.word("side", str(transplant.get("side"))),
                    verdict=view.word("transplant", str(transplant.get("verdict"))),
                    why=view.transplant(transplant),
                ),
            )
        for key in ("alone", "batched"):
            text = _walked(view, claims.walked(result, lang), key)
            if text:
                add("for" if key == "alone" else "open", text)
    told_of = {one.tokens for one in result.stability}
    if len(result.stability) == 2 and all(one.stable for one in result.stability) and len(told_of) == 1:
        add("for", view.say("page.believe_both_repeat", tokens=result.stability[0].tokens))
    else:
        for one in result.stability:
            key = "page.believe_repeats" if one.stable else "page.believe_not_repeats"
            about = {"side": f"@side.{one.side}", "tokens": one.tokens}
            add("for" if one.stable else "against" if first is None else "open", view.say(key, **about))
    if result.conditions:
        held = all(one.verdict == "ok" for one in result.conditions if one.required)
        ok = sum(one.verdict == "ok" for one in result.conditions)
        add("for" if held else "against", view.say("check.conditions", ok=ok, total=len(result.conditions)))
    if first is None and result.verdict == "aligned":
        for key, values in claims.checked(result):
            if key not in ("check.conditions", "check.stability"):  # these are there
                add("for", view.say(key, **values))
    return [one for one in found if one["text"]]


def _walked(view: View, found: Sequence[tuple[str, Mapping[str, Any]]], name: str) -> str:
    """The sentence ``walked.NAME``; empty if it is not among the claims."""
    return next((view.say(key, **values) for key, values in found if key == f"walked.{name}"), "")
