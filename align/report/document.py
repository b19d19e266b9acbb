"""``report.md``: a result as a document for people, in the order of seed 000's report.

A pure function of the result, so that it is rebuilt from ``result.json`` alone, in either language. What engines,
models and files said keeps its own language and is never markup.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from align.compare.calls import own_shape
from align.errors import UserError
from align.findings import PATHS
from align.knowledge import PATHS_ZH, Entry, Text, knowledge
from align.report import again, arguments, blocks, checklists, claims, ending, indices, ladder, paired, reach
from align.report.markdown import Markdown, escape, fence
from align.report.words import LANGUAGES, TEMPLATES, Words, words_of
from align.result.parts import Condition, Fact, Finding, WalkStep
from align.result.schema import Result
from align.result.walk import found_key
from align.sentences import is_said, raw, said, text_of

#: Findings that are told in full, and rows of a table.
FINDINGS, ROWS = 6, 24


def language(text: str) -> str:
    """``--lang``.

    Raises:
        UserError: not a language that there is.
    """
    if text not in LANGUAGES:
        raise UserError(f"--lang {text} is not known", f"choose one of {', '.join(LANGUAGES)}")
    return text


def render(result: Result, lang: str = "en") -> str:
    """The document, which ends with a line break."""
    view = View(result, words_of(lang))
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,  # that is for HTML; here everything that is printed passes through escape
        finalize=lambda value: "" if value is None else escape(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template("report.md.jinja").render(
        r=result,
        v=view,
        t=view.say,
        w=view.word,
        n=number,
        claims=claims,
        arguments=arguments,
        checklists=checklists,
        reach=reach,
        indices=indices,
        ladder=ladder,
        blocks=blocks,
        paired=paired,
        FINDINGS=FINDINGS,
        ROWS=ROWS,
        LANG=lang,
    )
    return text.rstrip("\n") + "\n"


def number(value: Any) -> str:
    """A number with four digits that count; text as it is; ``?`` for what is not known."""
    if value is None:
        return "?"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class View:
    """What the template asks a result for."""

    def __init__(self, result: Result, words: Words) -> None:
        self._result, self._words = result, words
        self._colon, self._comma = words("label.colon"), words("label.comma")
        self._list = words("label.list")

    @property
    def words(self) -> Words:
        """The language's sentences, without Markdown's escapes."""
        return self._words

    def say(self, key: str, /, **values: Any) -> Markdown:
        """A sentence. Its own marks are Markdown; what fills it is escaped. A value ``@KEY`` is a sentence too."""
        return Markdown(self._words(key, **{name: self._value(value) for name, value in values.items()}))

    def _value(self, value: Any) -> Markdown:
        if isinstance(value, str) and value.startswith("@") and self._words.has(value[1:]):
            return escape(self._words(value[1:]))
        if is_said(value):
            return self.told(value)
        if isinstance(value, (list, tuple)):
            return escape(self._names([str(one) for one in value]))
        if value == "-":
            return escape(self._words("label.none"))
        return escape(value if isinstance(value, Markdown) else number(value))

    def _names(self, found: list[str], limit: int = claims.LISTED) -> str:
        return claims.names(found, limit, self._list)

    def bracketed(self, *parts: str) -> Markdown:
        """Words in brackets, or nothing."""
        given = [escape(part) for part in parts if part]
        return self.say("label.bracket", text=Markdown(self._comma.join(given))) if given else Markdown("")

    def told(self, sentence: Mapping[str, Any] | None, text: str = "") -> Markdown:
        """What was found, in this language; ``text`` as a quotation where it was not kept as data."""
        try:
            return escape(text_of(sentence or raw(text), self._words.language))
        except KeyError:  # of another version
            return escape(text_of(raw(text), self._words.language))

    def quoted(self, text: str) -> Markdown:
        """Text of the engines, of a file or of another part that is kept in its own language."""
        return self.told(None, text) if text else Markdown("")

    def word(self, group: str, text: str | None, otherwise: str = "label.not_known") -> str:
        """The word for a value of a fixed set."""
        return self._words(otherwise) if text is None else self._words.word(group, text)

    # ---------------------------------------------------------------------------------------------------- problem

    def lead(self) -> Markdown:
        result = self._result
        unknown = self._words("lead.unknown")
        names = {**result.environment.traces, **result.engines}
        failed = ending.lead_of(result)
        side = ending.failed_side(result) or (result.findings[0].side if result.findings else None)
        return self.say(
            failed or f"lead.{result.verdict}",
            side=self.word("side", side or "both"),
            engine=names.get(side or "", unknown),
            candidate=names.get("candidate", unknown),
            reference=names.get("reference", unknown),
            model=unknown if result.case is None else result.case.model,
            findings=len(result.findings),
        )

    def verdict_word(self) -> str:
        """The verdict, or that an engine failed."""
        return self.word("verdict", ending.word_of(self._result))

    def measures(self) -> Markdown:
        """What a side alone ran with; empty if nothing."""
        found = again.measures_of(self._result)
        key = "lead.measures_given" if claims.nothing_compared(self._result) else "lead.measures"
        return self.say(key, measures=said("list.semicolon", parts=found)) if found else Markdown("")

    def reason(self) -> Markdown:
        return self.told(self._result.reason_told, self._result.reason)

    def fact(self, name: str) -> Fact:
        return next(one for one in self._result.facts if one.name == name)

    def answer(self, fact: Fact) -> Markdown:
        """Value, and for what was derived where it was seen."""
        value = escape(self.word("value", fact.value, "status.unknown"))
        where = self._where(fact)
        return Markdown(f"{value}{self._colon}{where}") if where and fact.status != "answered" else value

    def seen(self, fact: Fact) -> Markdown:
        """What the run saw where the user answered."""
        if fact.status != "answered" or fact.observed is None:
            return Markdown("")
        value, where = escape(self.word("value", fact.observed)), self._where(fact)
        return Markdown(f"{value}{self._colon}{where}") if where else value

    def _where(self, fact: Fact) -> str:
        about = fact.about
        if {"request", "index", "position"} <= about.keys():
            return self.say("about.place", **{key: about[key] for key in ("request", "index", "position")})
        ties = [self.say("about.ties", near_ties=about["near_ties"])] if about.get("near_ties") else []
        if "tokens" in about or ties:
            tokens = [self.say("about.tokens", tokens=about["tokens"])] if "tokens" in about else []
            return Markdown(self._comma.join([*tokens, *ties]))
        if fact.name == "batching" and fact.value is None and "requests" in about:
            return self.say("about.batching", requests=about["requests"])
        return ""

    def phase(self) -> str:
        """Of seed 000: prefill, decode or both; of the headline, as everywhere in the report."""
        result = self._result
        found = reach.phase_of(result.findings[0]) if result.findings else "phase.unknown"
        first = None if result.tokens is None else result.tokens.first
        if found == "phase.unknown" and first is not None:
            return self.word("phase", "prefill" if first.index == 0 else "decode")
        return self._words("phase.nothing" if result.verdict == "aligned" else found)

    def phase_of(self, finding: Finding) -> str:
        return self._words(reach.phase_of(finding))

    def module(self) -> Markdown:
        if not self._result.findings:
            return escape(self._words("label.none" if self._result.verdict == "aligned" else "label.not_known"))
        first = self._result.findings[0]
        parts = [self.word("kind", first.kind), *([first.checkpoint] if first.checkpoint else []), self._side(first)]
        return Markdown(f"{self.path(first)}{self._colon}{escape(self._comma.join(parts))}")

    # ------------------------------------------------------------------------------------------------------- cause

    def path(self, finding: Finding) -> Markdown:
        name = (PATHS if self._words.language == "en" else PATHS_ZH)[finding.path]
        return escape(name) if len(finding.path) > 1 else self.say("label.path", path=finding.path, name=name)

    def blocked(self) -> list[Condition]:
        """Conditions that stopped the comparison."""
        return [one for one in self._result.conditions if one.blocks]

    def known(self) -> list[Entry]:
        """What the table of kinds says about what was found, or about what stopped the comparison; each once."""
        result = self._result
        kinds = [finding.kind for finding in result.findings[:FINDINGS]]
        if result.verdict == "not comparable":
            kinds += ["condition"] if self.blocked() else []
            kinds += ["unstable"] if not all(side.stable for side in result.stability) else []
        table = knowledge()
        return [table.entries[kind] for kind in dict.fromkeys(kinds) if kind in table.entries]

    def known_text(self, text: Text) -> str:
        return text.of("en" if self._words.language == "en" else "zh")

    def files(self, entry: Entry) -> list[str]:
        """Of a model that is known to have no experts, none of theirs."""
        return list(knowledge().files(entry, claims.lacks(self._result)))

    def cause(self, finding: Finding) -> Markdown:
        return self._told("cause", finding) or self.say(
            "cause.other", kind=finding.kind, side=self._side(finding), checkpoint=finding.checkpoint or "-"
        )

    def what_next(self, finding: Finding) -> Markdown:
        """With the first file and line to read, where one is known."""
        text = self._told("next", finding, reach.about_experts(finding)) or self._told("next", finding)
        text, place = text or self.quoted(finding.next), reach.begin_at(finding)
        patches = self._result.environment.patches.get(finding.side or "", [])
        suspects = again.suspects(patches, finding.side, place)
        if place:
            text = Markdown(text.rstrip(".。") + self.say("next.begin", place=place))
        return text if suspects is None else Markdown(text.rstrip(".。") + self.say("next.suspect", measures=suspects))

    def next_step(self) -> Markdown:
        """Of the whole result."""
        result = self._result
        if result.findings:
            return self.what_next(result.findings[0])
        key = f"next.aligned {result.source}" if result.tokens is not None else "next.aligned tensors"
        if self._words.language != "en":
            if result.verdict == "aligned" and self._words.has(key):
                return self.say(key)
            if self.blocked():
                allow = " ".join(f"--allow {one.name}" for one in self.blocked())
                return self.say("next.conditions", allow=allow)
        return self.known_or_quoted("hint", result.next)

    def known_or_quoted(self, group: str, text: str) -> Markdown:
        """A text of ours that there are words for; any other as a quotation."""
        found = self._words.word(group, text)
        return escape(found) if self._words.has(f"{group}.{text}") else self.quoted(text)

    def evidence(self, finding: Finding) -> Markdown:
        return self.told(finding.evidence.get("sentence"), str(finding.evidence.get("what", finding.summary)))

    def transplant(self, one: Mapping[str, Any]) -> Markdown:
        return self.told(one.get("sentence"), str(one.get("why", "")))

    def first_difference(self) -> Markdown:
        assert self._result.tokens is not None and self._result.tokens.first is not None
        first = self._result.tokens.first
        about = {name: getattr(first, name) for name in ("request", "index", "candidate_id", "reference_id")}
        return self.say("verify.first", **about, why=self.told(first.told, first.why))

    def _told(self, group: str, finding: Finding, more: str = "") -> Markdown | None:
        """The sentence of a finding's kind; ``None`` if there is none, or its evidence lacks what that needs."""
        known = {**finding.evidence, "side": self._side(finding), "checkpoint": finding.checkpoint or "-"}
        known.setdefault("numbers", known.get("said"))
        if finding.kind == "configuration":
            said_by = [one for one in known.get("conditions", ()) if isinstance(one, Mapping)]
            known["names"] = [str(one.get("condition")) for one in said_by]
            known["where"] = list(dict.fromkeys(str(one.get("where")) for one in said_by))
        if "inputs_state" in known:
            known["inputs_state"] = self.word("tensor", str(known["inputs_state"]))
        kind = finding.kind
        if indices.is_fault(finding):
            kind = "fault"
            known |= indices.values(finding, self.say)
        try:
            return self.say(f"{group}.{kind}{more}", **{str(key): value for key, value in known.items()})
        except KeyError:
            return None

    def batch_title(self, finding: Finding) -> Markdown:
        """Of the table of the requests of a step."""
        size = len(finding.evidence.get("block") or finding.evidence.get("home") or ())
        about = {"step": finding.step, "size": size}
        return self.say("indices.batch", **about) if size else self.say("indices.batch_b", **about)

    def prompts(self) -> dict[str, int]:
        """Request → tokens of its prompt."""
        case = self._result.case
        return {} if case is None else {one.name: one.prompt_tokens for one in case.requests}

    def read_live(self, entries: list[dict[str, Any]]) -> str:
        """Places with live lines: what stands there, each once."""
        found = [f"{self.word('place', str(one.get('what')))} {one.get('place')}" for one in entries]
        return self._words("label.semicolon").join(dict.fromkeys(found))

    def tried(self, finding: Finding) -> list[Markdown]:
        """Hypotheses that do not explain it, or could not be tried, each with its number."""
        fits = finding.evidence.get("hypothesis")
        found = [one for one in finding.evidence.get("hypotheses") or () if one.get("name") != fits]
        return [self.told(one.get("sentence"), str(one.get("what"))) for one in found]

    def call_differences(self, finding: Finding) -> list[Markdown]:
        texts = list(finding.evidence.get("call_differences") or [])
        told = list(finding.evidence.get("call_differences_told") or [])
        told += [None] * (len(texts) - len(told))  # of an earlier version
        return [self.told(one, str(text)) for one, text in zip(told, texts, strict=False)]

    def arguments(self, finding: Finding) -> list[tuple[str, int, dict[str, Any]]]:
        """``(side, number, argument)`` of the accused call, the candidate's first; what a row lacks is empty.
        ``form`` is the engine's own shape, which has an axis for each stride.
        """
        empty = {"name": "", "type": "", "dtype": "", "value": "", "form": "", "strides": (), "mark": ""}
        return [
            (side, number, {**empty, **argument, "form": own_shape(argument.get("shape", ()), call.get("rows", 0))})
            for side, call in finding.evidence.get("calls", {}).items()
            for number, argument in enumerate(call.get("arguments", ())[:ROWS])
        ]

    def _side(self, finding: Finding) -> str:
        return self.word("side", finding.side or "both")

    def place(self, finding: Finding) -> Markdown:
        """Checkpoint, request, position, rank, as far as the finding has them."""
        parts = [] if finding.checkpoint is None else [escape(finding.checkpoint)]
        for label in ("request", "position", "rank"):
            found = [str(one) for one in getattr(finding, f"{label}s")]
            if found:
                words = self._words(f"label.{label}{'' if len(found) == 1 else 's'}")
                parts.append(Markdown(f"{words} {escape(self._list.join(reach.cut(found, claims.LISTED)))}"))
        return Markdown(self._comma.join(parts))

    def place_label(self, finding: Finding) -> str:
        if not (reach.is_worst_alone(finding) and finding.positions):
            return self._words("label.place")
        key = f"label.worst_{finding.evidence.get('worst_by')}"  # says by which test, where that is known
        return self._words(key if self._words.has(key) else "label.worst_place")

    def accused(self, name: str) -> Markdown:
        """Of a row of the table of checkpoints: that a finding names it."""
        sides = [self._side(one) for one in self._result.findings if name in (one.checkpoint, one.evidence.get("name"))]
        return self.say("verify.accused", side=sides[0]) if sides else Markdown("")

    def two_tests(self) -> bool:
        """Whether an accused checkpoint's row does not show that it is wrong."""
        tensors = self._result.tensors
        shown = {} if tensors is None else {one.name: one.verdict for one in tensors.shown}
        return any(shown.get(one.checkpoint or "") in ("equal", "within") for one in self._result.findings)

    # ------------------------------------------------------------------------------------------------------ the rest

    def listed(self, found: list[Any], otherwise: str) -> str:
        return self._names([str(one) for one in found], ROWS) if found else self._words(otherwise)

    def walk_why(self, step: WalkStep) -> str:
        keys = ([f"why.{step.stage} twice"] if step.about.get("again") else []) + [f"why.{step.stage}"]
        return next((self._words(key) for key in keys if self._words.has(key)), step.why)

    def walk_found(self, step: WalkStep) -> Markdown:
        about = dict(step.about)
        for name, group in (("side", "side"), ("verdict", "transplant")):
            if name in about:
                about[name] = self.word(group, str(about[name]))
        try:
            return self.say(found_key(step.stage, about), **about) if about else self.quoted(step.found)
        except KeyError:  # a stage or a number that this version does not know
            return self.quoted(step.found)

    def typed(self) -> Markdown:
        words = [*self._result.command[:1], *self._result.environment.argv[1:]]
        return fence(shlex.join(words), "sh")

    def again(self) -> Markdown | None:
        """The command that runs the same case; ``None`` if there is no case on disk."""
        words = again.command_again(self._result)
        return None if words is None else fence(shlex.join(words), "sh")

    def compare_again(self) -> Markdown | None:
        directory = self._result.environment.directory
        if directory is None or self._result.tensors is None or self._result.source != "run":
            return None
        return fence(shlex.join(["align", "compare", f"{directory}/candidate", f"{directory}/reference"]), "sh")

    def packages(self) -> list[tuple[str, Mapping[str, str]]]:
        return list(self._result.versions.items())
