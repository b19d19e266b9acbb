"""The audit of collectives in the report and the summary: what was right, what was wrong, what nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from align.collectives.audit import audit_calls, not_audited
from align.report.document import render
from align.report.terminal import show_findings
from align.result.schema import Result
from align.run.report import Report
from tests.unit.align.collectives.calls import call
from tests.unit.align.result import made

A, B = torch.ones(3, 4), torch.full((3, 4), 2.0)


def told(directory: Path, monkeypatch: pytest.MonkeyPatch, off: float) -> tuple[Report, Result]:
    """Two reduces of the candidate, of which rank 1's second result is off; the reference's are not known."""
    run = made.Run(directory, monkeypatch).go()
    records = {
        rank: [
            call(rank, "all_reduce", [(A, B)[rank]], [A + B + off * rank * at], at, "layers.0.attn.o") for at in (0, 1)
        ]
        for rank in (0, 1)
    }
    audits = {"candidate": audit_calls(records), "reference": not_audited("switched off")}
    run.report.collectives = audits
    run.report.findings = tuple(audits["candidate"].findings("candidate"))
    run.report.verdict = "diverged" if off else "aligned"
    return run.report, run.result()


def test_right_ones_are_counted_and_hidden_ones_are_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, result = told(tmp_path / "run", monkeypatch, 0.0)
    text = render(result)
    assert "candidate: every one of the 2 collectives that were made did what it promises: 2 all_reduce (0, 1)" in text
    assert "| candidate | all_reduce | 0, 1 | 2 | 0 | 0 |" in text
    assert "reference: collectives: switched off" in text
    assert result.collectives["candidate"].model_dump() == report.collectives["candidate"].to_dict()
    assert "## 集合通信" in render(result, "zh")


def test_a_wrong_one_is_in_the_table_and_among_the_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, result = told(tmp_path / "run", monkeypatch, 1.0)
    text = render(result)
    assert "| candidate | all_reduce | 0, 1 | 1 | 1 (ranks 1) | 0 |" in text
    assert "every one of" not in text
    assert "the result of rank 1 is not the sum of what the ranks put in" in text
    assert "The call: torch.distributed.all_reduce of ranks 0, 1, from engine/linear.py:12 forward" in text


def test_the_summary_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for off, expected in (
        (0.0, "candidate all right of 2 all_reduce"),
        (1.0, "candidate 1 fault (1 all_reduce on rank 1)"),
    ):
        report, _ = told(tmp_path / str(off), monkeypatch, off)
        show_findings(Console(width=400), report, "lmdeploy", "vllm", False, False, "written")
        assert f"collectives: {expected}" in capsys.readouterr().out
