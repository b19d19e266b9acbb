"""``junit.xml``: a result as test cases, one for each question that was judged, for whatever reads JUnit's format.

A question that the run could not answer is skipped with the reason, never passed. Attributes and their order are those
of the Jenkins schema (testsuites, testsuite, testcase; failure, error and skipped inside).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from align.report.markdown import visible
from align.result.parts import Condition
from align.result.schema import Result

State = Literal["passed", "failure", "error", "skipped"]
#: Beyond what :func:`visible` shows: no characters of XML.
_NO_XML = re.compile("[\ufffe\uffff]")
_SIDES = ("candidate", "reference")


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        group, name: which; stable from run to run.
        state: ``error`` is for what kept it from being judged although it had to be.
        message: one line; empty if it passed.
        text: more lines.
        seconds: 0 where no time is its own.
    """

    group: str
    name: str
    state: State
    message: str = ""
    text: str = ""
    seconds: float = 0.0


def render(result: Result) -> str:
    """The file, which ends with a line break; English, as names and summaries are."""
    cases = list(cases_of(result))
    seconds = f"{sum(result.timing.seconds.values()):.3f}"
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(one.state == "failure" for one in cases)),
        "errors": str(sum(one.state == "error" for one in cases)),
    }
    root = ElementTree.Element("testsuites", {"name": "align", **counts, "time": seconds})
    model = "unknown" if result.case is None else result.case.model
    engines = " ".join(result.engines.get(side, "unknown") for side in _SIDES)
    about = {"name": _clean(f"align {model} {engines}"), **counts}
    about["skipped"] = str(sum(one.state == "skipped" for one in cases))
    if result.timing.started:
        about["timestamp"] = _clean(result.timing.started)
    suite = ElementTree.SubElement(root, "testsuite", {**about, "time": seconds})
    for one in cases:
        attributes = {"classname": _clean(f"align.{one.group}"), "name": _clean(one.name)}
        element = ElementTree.SubElement(suite, "testcase", {**attributes, "time": f"{one.seconds:.3f}"})
        if one.state == "passed":
            continue
        told = {"message": _clean(" ".join(one.message.split()))}
        if one.state != "skipped":
            told["type"] = one.group
        child = ElementTree.SubElement(element, one.state, told)
        child.text = _clean(one.text or one.message, keep="\n\t")
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _clean(text: str, keep: str = "") -> str:
    return _NO_XML.sub(lambda one: f"\\u{ord(one[0]):04x}", visible(text, keep))


def cases_of(result: Result) -> Iterator[Case]:
    """Every question, in the order in which the run asks."""
    yield _verdict(result)
    yield from (_condition(one) for one in result.conditions)
    for side in result.stability:
        why = "" if side.stable else f"the {side.side} does not repeat its tokens: {side.first}"
        yield Case("stability", side.side, "passed" if side.stable else "failure", why)
    yield _tokens(result)
    yield _coverage(result)
    for side_name in _SIDES:
        yield from _audits(result, side_name)
    for number, one in enumerate(result.findings, 1):
        name = " ".join(filter(None, [one.path, one.kind, one.side, one.checkpoint]))
        yield Case("finding", f"{number} {name}", "failure", one.summary, f"{one.summary}\nnext: {one.next}")


def _verdict(result: Result) -> Case:
    seconds = sum(result.timing.seconds.values())
    if result.verdict == "aligned":
        return Case("verdict", "aligned", "passed", seconds=seconds)
    text = "\n".join(filter(None, [result.reason, f"next: {result.next}" if result.next else ""]))
    if result.verdict == "diverged":
        message = result.findings[0].summary if result.findings else result.reason
        return Case("verdict", "aligned", "failure", message, f"{message}\n{text}".strip(), seconds)
    return Case("verdict", "aligned", "error", f"not comparable: {result.reason}", text, seconds)


def _condition(one: Condition) -> Case:
    if one.verdict == "ok":
        return Case("condition", one.name, "passed")
    seen = ", ".join(f"{side} {one.observed.get(side)}" for side in _SIDES)
    text = f"requested: {one.requested}\nread back: {seen}\nmend: {one.mend}"
    message = f"{one.verdict}: {one.why}"
    if one.allowed:
        return Case("condition", one.name, "skipped", f"allowed, although {message}", text)
    if one.blocks:
        return Case("condition", one.name, "failure" if one.verdict == "false" else "error", message, text)
    return Case("condition", one.name, "skipped", f"noted, {message}", text)


def _tokens(result: Result) -> Case:
    if result.tokens is None:
        return Case("tokens", "greedy tokens", "skipped", "not compared")
    first = result.tokens.first
    if first is None:
        return Case("tokens", "greedy tokens", "passed")
    where = f"{first.request} token {first.index}"
    ids = f"candidate {first.candidate_id}, reference {first.reference_id}"
    return Case("tokens", "greedy tokens", "failure", f"{where}: {ids}: {first.why}")


def _coverage(result: Result) -> Case:
    seen = result.coverage
    if seen is None:
        return Case("tensors", "coverage", "skipped", "tensors were not compared")
    lacking = [*seen.paired.missing, *seen.paired.partial]
    if not lacking:
        return Case("tensors", "coverage", "passed")
    message = f"{seen.paired.observed} of {seen.paired.expected} checkpoints on both sides"
    text = "\n".join(f"{name}: {seen.paired.why.get(name, 'not observable')}" for name in lacking)
    below = seen.demanded is not None and seen.paired.percent < seen.demanded
    return Case("tensors", "coverage", "error" if below else "skipped", message, text)


def _audits(result: Result, side: str) -> Iterator[Case]:
    """What is judged exactly; each skipped where nothing of it was seen."""
    weights = result.weights.get(side)
    if weights is None:
        yield Case("weights", side, "skipped", "not audited")
    elif weights.differs:
        total = weights.equal + weights.differs
        yield Case("weights", side, "failure", f"{weights.differs} of {total} parameters differ from the checkpoint")
    elif weights.not_observable:
        text = "\n".join(weights.not_observable)
        message = f"{len(weights.not_observable)} parameters could not be looked at"
        yield Case("weights", side, "skipped", message, text)
    else:
        yield Case("weights", side, "passed")
    ledger = result.ledger.get(side)
    if ledger is None:
        yield Case("cache indices", side, "skipped", "not audited")
    else:
        yield _audit("cache indices", side, ledger.observable, ledger.faults, ledger.records, ledger.unseen)
    collectives = result.collectives.get(side)
    if collectives is not None:
        found = (collectives.observable, collectives.faults, collectives.records, collectives.unseen)
        yield _audit("collectives", side, *found)
    arguments = result.arguments.get(side)
    if arguments is None:
        yield Case("attention arguments", side, "skipped", "not audited")
    else:
        errors = [one for one in arguments.groups if one.severity == "ERROR"]
        calls = sum(one.calls for one in errors)
        found_in = (arguments.observable, calls, arguments.calls, arguments.unseen)
        yield _audit("attention arguments", side, *found_in, [f"{one.rule}: {one.said['en']}" for one in errors])


def _audit(
    group: str, side: str, observable: bool, faults: int, total: int, unseen: list[str], told: list[str] | None = None
) -> Case:
    if not observable:
        return Case(group, side, "skipped", f"not observable: {'; '.join(unseen)}")
    if faults:
        return Case(group, side, "failure", f"{faults} wrong of {total} that were looked at", "\n".join(told or ()))
    if unseen:
        return Case(group, side, "skipped", "right as far as it was seen; not everything was", "\n".join(unseen))
    return Case(group, side, "passed")
