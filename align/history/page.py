"""The index page of a night, and its JUnit file. Pure functions of what the store holds."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from align.history.changes import Change, State
from align.history.plan import Plan
from align.history.store import Night, Outcome

#: Verdict → mark and style; the mark tells without a colour.
_VERDICTS = {"aligned": ("✓", "good"), "diverged": ("✗", "bad"), "not comparable": ("?", "warn")}
_STATES: dict[State, str] = {"new": "bad", "moved": "bad", "known": "warn", "fixed": "good", "unknown": "warn"}
#: What a case's row links to, the best first; a run leaves some of them.
_PAGES = ("report.html", "report.md")
#: Characters that XML cannot hold, whatever was printed by an engine.
_NO_XML = {number: None for number in range(32) if chr(number) not in "\t\n\r"}


def page(plan: Plan, night: Night, outcomes: Sequence[Outcome], before: bool, directory: Path, simulated: bool) -> str:
    """``index.html``: a row for each case, the worst first. Everything that came from elsewhere is escaped.

    Args:
        before: whether there was a night before.
        directory: of the night; links are taken from it.
        simulated: the engines ran on a simulated device.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    done = {one.case for one in outcomes}
    content: dict[str, Any] = {
        "plan": plan.name,
        "night": night,
        "before": before,
        "simulated": simulated,
        "counts": _counts(outcomes),
        "rows": [_row(one, directory) for one in sorted(outcomes, key=_order)],
        "missing": [one.name for one in plan.cases if one.name not in done],
    }
    # The same page has the same nonce: nothing that was not in it when it was written can know its content before.
    nonce = base64.b64encode(hashlib.sha256(repr(content).encode()).digest()[:12]).decode()
    return environment.get_template("index.html.jinja").render(nonce=nonce, **content)


def _order(one: Outcome) -> int:
    if one.of("new", "moved"):
        return 0
    if not one.comparable:
        return 1
    return 2 if one.verdict == "diverged" else 3


def _counts(outcomes: Sequence[Outcome]) -> list[tuple[str, int, str]]:
    found = [
        (verdict, sum(one.verdict == verdict for one in outcomes), style) for verdict, (_, style) in _VERDICTS.items()
    ]
    for state, style in _STATES.items():
        count = sum(len(one.of(state)) for one in outcomes)
        if count or state in ("new", "known", "fixed"):
            found.append((f"{state} findings" if count != 1 else f"{state} finding", count, style))
    return found


def _row(one: Outcome, directory: Path) -> dict[str, Any]:
    mark, style = _VERDICTS[one.verdict]
    run = Path(one.directory)
    link = next((run / name for name in _PAGES if (run / name).is_file()), None)
    notes = [f"compared with night {one.earlier}"] if one.earlier else []
    notes += ["not comparable in the night before, either"] if one.failed_before and not one.comparable else []
    return {
        "case": one.case,
        "link": None if link is None or not link.is_relative_to(directory) else quote(str(link.relative_to(directory))),
        "mark": mark,
        "style": style,
        "verdict": one.verdict,
        "reason": one.reason,
        "note": "; ".join(notes),
        "found": [_found(change) for change in one.changed],
        "seconds": f"{one.seconds:.0f}",
    }


def _found(change: Change) -> dict[str, str]:
    moved = change.state == "moved" and change.before is not None
    return {
        "state": change.state,
        "style": _STATES[change.state],
        "summary": change.found.summary,
        "was": change.before.summary if moved and change.before is not None else "",
        "fingerprint": change.found.fingerprint,
    }


def junit(plan: Plan, night: Night, outcomes: Sequence[Outcome]) -> str:
    """``junit.xml``: a test for each case. A finding is a failure, new or known; a case that cannot be compared is an
    error; one that was not run yet is skipped.
    """
    done = {one.case: one for one in outcomes}
    failed = sum(bool(one.findings) or one.verdict == "diverged" for one in outcomes)
    errors = sum(not one.comparable for one in outcomes)
    skipped = sum(one.name not in done for one in plan.cases)
    counts = {"tests": len(plan.cases), "failures": failed, "errors": errors, "skipped": skipped}
    about = {name: str(count) for name, count in counts.items()}
    about["time"] = f"{sum(one.seconds for one in outcomes):.1f}"
    root = ElementTree.Element("testsuites", {"name": f"align {plan.name}", **about})
    named = {"name": f"night {night.number}", "timestamp": night.started}
    suite = ElementTree.SubElement(root, "testsuite", {**named, **about})
    for case in plan.cases:
        one = done.get(case.name)
        seconds = "0" if one is None else f"{one.seconds:.1f}"
        test = ElementTree.SubElement(suite, "testcase", classname=f"align.{plan.name}", name=case.name, time=seconds)
        if one is None:
            ElementTree.SubElement(test, "skipped", message="not run yet")
        elif not one.comparable:
            ElementTree.SubElement(test, "error", type="not comparable", message=_xml(one.reason)).text = _xml(
                one.reason
            )
        elif one.verdict == "diverged":
            text = "\n".join(f"{change.state}: {change.found.summary}" for change in one.changed)
            kind = "new" if one.of("new", "moved") else "known"
            head = next((change for change in one.changed if change.state != "fixed"), None)
            message = "diverged" if head is None else f"{head.state}: {head.found.summary}"
            ElementTree.SubElement(test, "failure", type=kind, message=_xml(message)).text = _xml(text)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return text.translate(_NO_XML)
