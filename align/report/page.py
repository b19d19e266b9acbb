"""What ``report.html`` shows, as one JSON-able object: a pure function of the result, in one language.

Sentences are Markdown of :class:`align.report.document.View`, in which nothing of a model, file or engine is markup;
:mod:`align.report.html` turns them into HTML. Everything else is plain text.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from align.compare.coverage import percent_text
from align.findings import PATHS
from align.knowledge import PATHS_ZH
from align.report import again, arguments, blocks, claims, indices, ladder, page_rest, paired, reach
from align.report.document import FINDINGS, View
from align.report.markdown import Markdown, escape
from align.report.page_map import drift_of, map_of, sites_of
from align.report.page_numbers import numbers_of
from align.report.words import words_of
from align.result.parts import Finding
from align.result.schema import Result
from align.sentences import raw

#: Words that the page's own script shows.
SCRIPT_WORDS = "page_script"


def page_of(result: Result, lang: str = "en") -> dict[str, Any]:
    """Everything on the page.

    Args:
        lang: of :data:`align.report.words.LANGUAGES`.
    """
    view, words = View(result, words_of(lang)), words_of(lang)

    def plain(key: str, /, **values: Any) -> str:
        return words(key, **values)

    found = map_of(result, plain, lang)
    return {
        "lang": "zh-CN" if lang == "zh" else lang,
        "title": words("page.title", verdict=words.word("verdict", result.verdict), model=_model(result, view)),
        "verdict": result.verdict,
        "verdict_word": words.word("verdict", result.verdict),
        "lead": view.lead(),
        "sentence": _sentence(result, view),
        "reason": view.say("lead.reason", reason=view.reason()) if result.reason else "",
        "measures": view.measures(),
        "remarks": [view.say("lead.remark", remark=view.quoted(one)) for one in result.remarks],
        "simulated": view.say("lead.simulated") if result.simulated and not claims.nothing_compared(result) else "",
        "next": view.next_step() if result.next or result.findings else "",
        "tiles": _tiles(result, view, lang),
        "believed": _believed(result, view, lang),
        "findings": [_finding(result, view, one, at) for at, one in enumerate(result.findings[:FINDINGS])],
        "more_findings": max(0, len(result.findings) - FINDINGS),
        "blocked": [
            view.say(
                "label.blocked",
                name=one.name,
                requested=one.requested,
                why=view.told(one.why_told, one.why),
                mend=view.known_or_quoted("mend", one.mend),
            )
            for one in view.blocked()
        ],
        "known": [_known(view, entry) for entry in view.known()],
        "scope": _claims(view, reach.scope(result)),
        "facts": [
            {
                "what": words.word("fact", one.name),
                "answer": view.answer(one),
                "status": words.word("status", one.status),
                "seen": view.seen(one),
            }
            for one in result.facts
        ],
        "symptom": _claims(view, claims.symptom(result)),
        "map": found,
        "sites": sites_of(result) if found is not None else [],
        "drift": drift_of(result),
        "tensors": page_rest.tensors_of(result, view),
        "tokens": page_rest.tokens_of(result, view),
        "conditions": page_rest.conditions_of(result, view),
        "walk": page_rest.walk_of(result, view),
        "ladder": [
            {**one, "verdict_word": words.word("verdict", one["verdict"]), "what": _told(view, one["what"])}
            for one in ladder.rows(result)
        ],
        "ladder_lines": _claims(view, ladder.lines(result)),
        "paired": _claims(view, paired.lines(result)),
        "collectives": page_rest.collectives_of(result, view),
        "ledger": page_rest.ledger_of(result, view),
        "arguments": page_rest.arguments_of(result, view, lang),
        "checklists": page_rest.checklists_of(result, view, lang),
        "coverage": page_rest.coverage_of(result, view),
        "checked": _claims(view, claims.checked(result)),
        "unchecked": _claims(view, claims.unchecked(result)),
        "risks": _claims(view, claims.risks(result)),
        "measures_made": [
            {"file": one.file, "side": words.word("side", one.side), "change": one.change, "reason": one.reason}
            for one in result.measures
        ],
        "reproduce": _reproduce(result),
        "versions": [
            {"side": words.word("side", side), "packages": dict(packages)} for side, packages in view.packages()
        ],
        "words": {
            key.removeprefix(f"{SCRIPT_WORDS}."): sentence
            for key, sentence in words.sentences.items()
            if key.startswith(f"{SCRIPT_WORDS}.")
        },
        "started": result.timing.started,
    }


def data_of(page: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a page that its script reads."""
    return {key: page[key] for key in ("lang", "map", "sites", "drift", "words")}


def _model(result: Result, view: View) -> str:
    return view.say("lead.unknown") if result.case is None else result.case.model


def _claims(view: View, found: Any) -> list[str]:
    return [view.say(key, **values) for key, values in found]


def _told(view: View, sentence: Any) -> str:
    return view.told(sentence) if sentence else ""


# ------------------------------------------------------------------------------------------------------- first screen


def _sentence(result: Result, view: View) -> str:
    """The verdict in one sentence: path, side, origin and kind."""
    if not result.findings:
        return view.reason() if result.reason else ""
    first = result.findings[0]
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


def _tiles(result: Result, view: View, lang: str) -> list[dict[str, str]]:
    """Four facts that a stranger must see first."""
    if not result.findings:
        return _tiles_clean(result, view)
    first = result.findings[0]
    note, kind = "", _kind(view, first)
    if result.diagnosis is not None and result.diagnosis.fits and result.diagnosis.checkpoint == first.checkpoint:
        fit = result.diagnosis.fits[0]
        kind, note = fit.sentence[lang].rstrip(".。"), view.told(fit.told or raw(fit.text))
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
            "value": path,
            "note": escape(names[first.path]) if len(first.path) == 1 else "",
        },
        {
            "label": view.say("page.tile_side"),
            "value": result.engines.get(first.side or "", "") or view.word("side", first.side or "both"),
            "note": view.word("side", first.side or "both"),
        },
        {
            "label": view.say("page.tile_origin"),
            "value": first.checkpoint or view.say("label.not_known"),
            "note": Markdown(f"{view.phase_of(first)}") if first.checkpoint else places,
        },
        {"label": view.say("page.tile_kind"), "value": kind, "note": note},
    ]


def _tiles_clean(result: Result, view: View) -> list[dict[str, str]]:
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


def _believed(result: Result, view: View, lang: str) -> list[dict[str, Any]]:
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
            add("for", view.say("page.believe_inputs", state=view.word("tensor", str(inputs))))
        oracle = result.diagnosis
        if oracle is not None and oracle.checkpoint == first.checkpoint:
            judged = [one.verdict for one in oracle.sides.values()]
            state = "for" if oracle.side is not None and oracle.side == first.side else "open"
            told = claims_text(view, claims.walked(result, lang), "oracle")
            add(state if "not observable" not in judged else "open", told)
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
            text = claims_text(view, claims.walked(result, lang), key)
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
        for text in _claims(view, claims.checked(result)):
            if all(text != one["text"] for one in found):
                add("for", text)
    return [one for one in found if one["text"]]


def claims_text(view: View, found: Sequence[tuple[str, Mapping[str, Any]]], name: str) -> str:
    """The sentence ``walked.NAME``; empty if it is not among the claims."""
    return next((view.say(key, **values) for key, values in found if key == f"walked.{name}"), "")


# ----------------------------------------------------------------------------------------------------------- findings


def _finding(result: Result, view: View, finding: Finding, at: int) -> dict[str, Any]:
    def plain(key: str, /, **values: Any) -> str:
        return text_plain(view, key, **values)

    pages = blocks.blocks(finding)
    asked = blocks.batch(finding, view.prompts())
    call = finding.evidence.get("collective")
    lines: list[str] = [view.say("label.tried", what=one) for one in view.tried(finding)]
    if isinstance(call, Mapping):
        site = call["site"][0] if call.get("site") else "@label.not_known"
        lines.append(view.say("label.collective", function=call.get("function"), group=call.get("group"), site=site))
    for key in ("flips", "likely"):
        told = finding.evidence.get(key)
        if told:
            lines.append(view.say(f"label.{key}", what=view.told(told["told"] if key == "flips" else told)))
    if finding.evidence.get("site") and finding.path == "FA":
        lines.append(view.say("label.site", site=finding.evidence["site"][0], arguments=arguments.given(finding)))
    lines += _claims(view, indices.lines(finding, view.say))
    if finding.evidence.get("ladder"):
        lines.append(view.say("ladder.finding", what=finding.evidence["ladder"]["sentence"]))
    return {
        "number": at + 1,
        "path": finding.path,
        "path_name": view.path(finding),
        "cause": view.cause(finding),
        "place_label": view.place_label(finding),
        "place": view.place(finding) or view.say("label.all_or_unknown"),
        "phase": view.phase_of(finding),
        "evidence": view.evidence(finding),
        "next": view.what_next(finding),
        "numbers": numbers_of(result, finding, plain),
        "lines": lines,
        "words": _claims(view, indices.words(finding)),
        "batch": {
            "title": view.batch_title(finding),
            "rows": [
                {
                    "request": row["request"],
                    "row": row["row"],
                    "prompt": "?" if row["prompt"] is None else row["prompt"],
                    "cached": blocks.cached(row, view.say),
                    "computed": blocks.span(row["start"], row["end"], view.say),
                    "length": "?" if row["kv_len"] is None else row["kv_len"],
                    "table": ", ".join(map(str, row["table"])),
                }
                for row in asked
            ],
            "shared": view.say("indices.shared", blocks=blocks.shared(asked)) if blocks.shared(asked) else "",
        }
        if asked
        else None,
        "blocks": [
            {
                "title": view.say(
                    one.title, block=one.number, layer=finding.layer, step=finding.step, slot=one.accused
                ),
                "notes": _claims(view, blocks.notes(finding, pages)) if one is pages[0] else [],
                "rows": [
                    {
                        "mark": blocks.mark(row),
                        "accused": bool(row.get("accused")),
                        "lost": bool(row.get("lost")),
                        "slot": row["slot"],
                        "should": blocks.should(row, view.say),
                        "before": blocks.cell(row["before"], view.say),
                        "after": blocks.cell(row["after"], view.say),
                        "changed": row["before"] != row["after"],
                    }
                    for row in one.rows
                ],
                "like": view.say("indices.like", count=one.like) if one.like else "",
                "left": view.say("indices.more", count=one.left) if one.left else "",
            }
            for one in pages
        ],
        "read": [
            {
                "side": view.word("side", side),
                "places": [
                    {"what": view.word("place", str(one.get("what"))), "place": str(one.get("place"))}
                    for one in _once(entries)
                ],
            }
            for side, entries in (finding.evidence.get("read") or {}).items()
            if entries
        ],
        "call": [
            {"side": view.word("side", side), "number": number, **one, "mark_word": _mark(view, one["mark"])}
            for side, number, one in view.arguments(finding)
        ],
        "call_lines": [view.say("calls.differs", what=text) for text in view.call_differences(finding)],
    }


def text_plain(view: View, key: str, /, **values: Any) -> str:
    """A sentence as plain text; what fills it is not escaped, for it goes where text is text."""
    return view.words(key, **values)


def _mark(view: View, mark: str) -> str:
    return view.word("mark", mark) if mark else ""


def _once(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({(one.get("what"), one.get("place")): one for one in entries}.values())


def _known(view: View, entry: Any) -> dict[str, Any]:
    return {
        "title": view.say("label.known", source=view.word("source", entry.source), kind=entry.id),
        "causes": [view.known_text(one) for one in entry.causes],
        "checks": [view.known_text(one) for one in entry.checks],
        "treatment": view.known_text(entry.treatment),
        "files": view.files(entry),
    }


def _reproduce(result: Result) -> dict[str, str]:
    """Commands as they are typed."""
    words = again.command_again(result)
    directory = result.environment.directory
    compare = ["align", "compare", f"{directory}/candidate", f"{directory}/reference"]
    compared = directory is not None and result.tensors is not None and result.source == "run"
    return {
        "typed": shlex.join([*result.command[:1], *result.environment.argv[1:]]),
        "again": "" if words is None else shlex.join(words),
        "compare": shlex.join(compare) if compared else "",
        "open": "" if directory is None or result.source != "run" else shlex.join(["align", "open", directory]),
    }
