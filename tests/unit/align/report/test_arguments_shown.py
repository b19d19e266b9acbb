"""Arguments of attention in the report and the summary: broken rules, and both sides beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from align.attention.audit import audit_side, not_audited
from align.attention.beside import beside
from align.attention.explain import with_arguments
from align.report.arguments import ranges
from align.report.document import render
from align.report.terminal import show_findings
from align.result.schema import Result
from align.run.report import Report
from tests.unit.align.attention.recorded_calls import MODEL, atb, fused, left, steps
from tests.unit.align.result import made


def told(directory: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> tuple[Report, Result]:
    """The reference's scale is left out in layers 1 and 2, or is not."""
    run = made.Run(directory / "run", monkeypatch).go()
    calls = [(fused(), (0,)), (fused(scale=None), (1, 2))] if wrong else [(fused(), (0, 1, 2))]
    records = {
        "candidate": left(directory / "a", {steps("prefill"): [(atb(), (0, 1, 2))]}),
        "reference": left(directory / "b", {steps("prefill"): calls}),
    }
    run.report.arguments = {role: audit_side(one, MODEL) for role, one in records.items()}
    run.report.beside = beside(records, dict.fromkeys(records, MODEL))
    run.report.findings = with_arguments((), run.report.arguments)
    run.report.verdict = "diverged" if wrong else "aligned"
    return run.report, run.result()


def test_a_wrong_argument_is_a_finding_a_row_and_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, result = told(tmp_path, monkeypatch, True)
    text, chinese = render(result), render(result, "zh")
    assert "| reference | ERROR | fa.scale.model | npu_fused_infer_attention_score | prefill | 1-2 | 2 |" in text
    assert "first in layer 1, step 0" in text
    assert "layers 1-2 (step 0 of the candidate, 0 of the reference)" in text
    assert any(row.name == "scale" and row.verdict == "different" for row in result.arguments_beside[1].rows)
    assert "FlashAttention" in text and "## Attention 与缓存算子的入参" in chinese and "规则 fa.scale.model" in chinese
    assert result.arguments["reference"].model_dump() == report.arguments["reference"].to_dict()
    assert result.findings[0].path == "FA" and result.findings[0].phase == "prefill"


def test_right_arguments_are_said_to_be_checked_and_unseen_ones_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, result = told(tmp_path, monkeypatch, False)
    text = render(result)
    assert "reference: the arguments of 3 calls of attention and cache operators (prefill): no rule is broken" in text
    show_findings(Console(width=400), report, "lmdeploy", "vllm", False, False, "written")
    assert "attention arguments: candidate all right in 3 calls (1 different)" in capsys.readouterr().out
    report.arguments["reference"] = not_audited("switched off")
    old = result.model_copy(update={"arguments": {}, "arguments_beside": []})
    assert "The arguments of the candidate's attention and cache operators." in render(old)
    assert "## Arguments" not in render(old)


def test_layers_are_shown_as_ranges() -> None:
    assert [ranges(one) for one in ([], [3], [2, 0, 1], [0, 1, 4])] == ["", "3", "0-2", "0-1, 4"]
