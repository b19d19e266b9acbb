"""What ``report.html`` shows, as one JSON-able object: a pure function of the result, in one language.

Sentences are Markdown of :class:`align.report.document.View`, in which nothing of a model, file or engine is markup;
:mod:`align.report.html` turns them into HTML. Everything else is plain text.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from align.report import again, arguments, blocks, cause, claims, ending, indices, ladder, page_rest, paired, reach
from align.report.document import FINDINGS, View
from align.report.page_first import believed_of, sentence_of, tiles_of
from align.report.page_map import drift_of, map_of, sites_of
from align.report.page_numbers import numbers_of
from align.report.words import words_of
from align.result.parts import Finding
from align.result.schema import Result

#: Words that the page's own script shows.
SCRIPT_WORDS = "page_script"
#: Reasons of the verdict on the first screen; the others are folded.
REASONS = 2


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
        "title": words("page.title", verdict=view.verdict_word(), model=_model(result, view)),
        "verdict": result.verdict,
        "verdict_word": view.verdict_word(),
        "about": _about(result, view),
        "sentence": sentence_of(result, view),
        "joined": view.told(joined) if (joined := cause.cause_of(result)) is not None else "",
        "whole": view.say("page.whole", scope=whole) if (whole := reach.whole(result)) is not None else "",
        "introduced": view.told(introduced) if (introduced := ladder.introduced(result)) is not None else "",
        "reason": view.say("lead.reason", reason=view.reason()) if result.reason else "",
        "measures": view.measures(),
        "remarks": [view.say("lead.remark", remark=view.quoted(one)) for one in result.remarks],
        "simulated": view.say("lead.simulated") if result.simulated and not claims.nothing_compared(result) else "",
        "next": view.next_step() if result.next or result.findings else "",
        "tiles": tiles_of(result, view, lang),
        "shown": REASONS,
        "failed": ending.failed_side(result) is not None and bool(result.reason),
        "believed": believed_of(result, view, lang),
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


def _about(result: Result, view: View) -> str:
    """What was compared, in short; the heading has the verdict."""
    if not result.findings:
        return view.lead()
    unknown = view.say("lead.unknown")
    names = {side: result.engines.get(side, unknown) for side in ("candidate", "reference")}
    return view.say("page.about", **names, model=_model(result, view), findings=len(result.findings))


def _claims(view: View, found: Any) -> list[str]:
    return [view.say(key, **values) for key, values in found]


def _told(view: View, sentence: Any) -> str:
    return view.told(sentence) if sentence else ""


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
