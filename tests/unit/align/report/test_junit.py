"""``junit.xml``: one case for each question, read back by the readers that others use."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from junitparser import JUnitXml

from align.report import junit
from align.result.build import Command, result_of
from align.result.ground import Ground
from align.result.schema import Result
from align.run.flow import Wishes
from align.run.report import Report
from tests.unit.align.report import pages
from tests.unit.align.result import made
from tests.unit.align.run import recordings

#: Attributes and children of each element in the Jenkins schema.
SCHEMA = {
    "testsuites": ({"name", "time", "tests", "failures", "disabled", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "time", "disabled", "skipped", "timestamp", "hostname", "id"},
        {"properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": (
        {"name", "assertions", "time", "classname", "status"},
        {"skipped", "error", "failure", "system-out", "system-err"},
    ),
    "failure": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
    "skipped": ({"message"}, set()),
}


def read(result: Result, directory: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """(group, name) → (state, message), after a look at the form."""
    file = directory / "junit.xml"
    file.write_text(junit.render(result), encoding="utf-8")
    root = ElementTree.parse(file).getroot()
    for element in root.iter():
        attributes, children = SCHEMA[element.tag]
        assert set(element.keys()) <= attributes, element.tag
        assert {child.tag for child in element} <= children, element.tag
    (suite,) = JUnitXml.fromfile(str(file))
    cases = {}
    for case in suite:
        told = [(type(one).__name__.lower(), one.message) for one in case.result]
        (cases[case.classname.removeprefix("align."), case.name],) = told or [("passed", "")]
    states = [state for state, _ in cases.values()]
    assert len(cases) == suite.tests, "every case has a name of its own"
    assert (states.count("failure"), states.count("error"), states.count("skipped")) == (
        suite.failures,
        suite.errors,
        suite.skipped,
    )
    return cases


def test_a_clean_run_passes_what_was_judged_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(made.Run(tmp_path / "run", monkeypatch).go().result(), tmp_path)
    assert found["verdict", "aligned"] == ("passed", "")
    assert found["tokens", "greedy tokens"][0] == found["tensors", "coverage"][0] == "passed"
    assert found["condition", "eager"][0] == "passed"
    assert found["weights", "candidate"] == ("skipped", "not audited"), "no pass"
    assert "failure" not in {state for state, _ in found.values()}


@pytest.mark.parametrize("path", ["A", "B", "C", "FA"])
def test_each_finding_is_a_failure_with_its_summary(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pages.result_of(path, tmp_path / "run", monkeypatch)
    found = read(result, tmp_path)
    assert found["verdict", "aligned"] == ("failure", result.findings[0].summary)
    of_findings = [(state, message) for (group, _), (state, message) in found.items() if group == "finding"]
    assert of_findings == [("failure", one.summary) for one in result.findings]
    audits = {"A": ("cache indices", "candidate"), "C": ("collectives", "candidate")}
    audits["FA"] = ("attention arguments", "reference")
    if path in audits:
        assert found[audits[path]][0] == "failure"


def test_what_stopped_it_is_an_error_or_a_failure_with_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for verdict, state in (("false", "failure"), ("unknown", "error")):
        condition = recordings.condition(verdict)
        run = made.Run(tmp_path / verdict, monkeypatch, conditions=(condition,)).go()
        found = read(run.result(), tmp_path)
        assert found["condition", "eager"][0] == state
        assert found["verdict", "aligned"][0] == "error"
        assert found["tokens", "greedy tokens"][0] == "skipped"
    nothing = read(result_of(Report(reason="no such model"), Ground("run"), Command()), tmp_path)
    assert nothing["verdict", "aligned"] == ("error", "not comparable: no such model")


def test_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, wishes=Wishes(tensors=False)).go()
    assert read(run.result(), tmp_path)["tensors", "coverage"] == ("skipped", "tensors were not compared")


def test_whatever_others_wrote_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = '<x a="b">&amp;]]>\x00\x1b[31m\ufffe\uffff\ud800 \u2028'
    result = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    first = result.findings[0].model_copy(update={"summary": evil, "next": evil, "kind": evil})
    found = read(result.model_copy(update={"findings": [first], "reason": evil}), tmp_path)
    state, message = found["verdict", "aligned"]
    assert state == "failure"
    assert '<x a="b">&amp;]]>\\u0000\\u001b[31m\\ufffe\\uffff\\ud800' in message
