"""Arguments among the stages of a run: kept in the trace, judged without engines, and told where a run broke off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from align.attention.audit import NO_RECORDS
from align.errors import SideError, UserError
from align.fa.files import FOLDER
from align.findings import Finding
from align.run.arguments import ended_by_arguments, judge_folders, judge_recordings, judge_run, keep_arguments
from align.run.report import Report
from tests.unit.align.attention.recorded_calls import MODEL, atb, fused, left, steps
from tests.unit.align.run import fakes, recordings

FAILED = SideError("candidate", "the candidate failed", "read its log")


def ran(directory: Path, **wrong: Any) -> Any:
    """A session whose candidate made a call of prefill; the reference none."""
    left(directory / "candidate" / FOLDER, {steps("prefill"): [(fused(**wrong), (0, 1))]})
    side = SimpleNamespace(engine="vllm", free=None)
    roles = ("candidate", "reference")
    return SimpleNamespace(
        roles=roles,
        directories={role: directory / role for role in roles},
        outcome=SimpleNamespace(sides=dict.fromkeys(roles, side)),
    )


@pytest.mark.parametrize(("wrong", "ended"), [({}, False), ({"num_heads": 8}, True)])
def test_a_failure_with_a_wrong_call_is_a_finding(tmp_path: Path, wrong: dict[str, Any], ended: bool) -> None:
    report = Report()
    assert ended_by_arguments(report, ran(tmp_path, **wrong), fakes.case(), fakes.info(), FAILED) is ended
    assert bool(report.findings) is ended
    assert report.arguments["candidate"].observable and "reference" not in report.arguments


def test_a_condition_that_stopped_the_run_is_an_answer_and_one_that_nobody_read_is_none(tmp_path: Path) -> None:
    false = recordings.condition("false")
    for condition, expected in ((false, False), (replace(false, verdict="unknown"), True)):
        report, session = Report(conditions=(condition,)), ran(tmp_path / condition.verdict, num_heads=8)
        assert ended_by_arguments(report, session, fakes.case(), fakes.info(), FAILED) is expected
        assert report.findings, "what was found is told either way"


def test_another_error_is_not_explained(tmp_path: Path) -> None:
    report = Report()
    assert not ended_by_arguments(report, ran(tmp_path, num_heads=8), fakes.case(), fakes.info(), UserError("no", "go"))
    assert [one.path for one in report.findings] == ["FA"]


def test_what_was_judged_from_the_trace_is_not_judged_again(tmp_path: Path) -> None:
    session, report = ran(tmp_path, num_heads=8), Report(findings=(Finding("UNLOCATED", "tokens"),))
    judge_run(report, session, fakes.case(), fakes.info())
    assert [one.path for one in report.findings][-1] == "UNLOCATED" and report.findings[0].path == "FA"
    judge_run(report, session, fakes.case(), fakes.info())
    assert len({one.summary for one in report.findings}) == len(report.findings)


def test_records_go_with_the_trace_and_are_judged_there(tmp_path: Path) -> None:
    left(tmp_path / "work" / FOLDER, {steps("prefill"): [(atb(scale_value=1.0), (0, 1))]})
    for name in ("trace", "other"):
        (tmp_path / name).mkdir()
    keep_arguments(tmp_path / "work", tmp_path / "trace")
    keep_arguments(tmp_path / "nowhere", tmp_path / "other")
    manifest = {"model": {}, "layout": {"tp": 1}, "case": {"dtype": "bfloat16"}, "engine": "lmdeploy"}
    traces: Any = {
        role: SimpleNamespace(directory=tmp_path / name, manifest=manifest)
        for role, name in (("candidate", "trace"), ("reference", "other"))
    }
    report = Report()
    judge_recordings(report, traces)
    assert report.arguments["candidate"].calls == 2
    assert report.arguments["reference"].unseen == (NO_RECORDS,) and report.beside == ()


def test_damaged_records_are_told(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text('{"run": 1, "step": "x"}\n')
    audits, _ = judge_folders({"candidate": tmp_path}, {"candidate": MODEL}, {"candidate": "vllm"})
    assert not audits["candidate"].observable and "cannot be read" in audits["candidate"].unseen[0]
