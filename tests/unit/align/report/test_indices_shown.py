"""A finding of the ledger in the report: everything that is needed to follow it by hand, in both languages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from align.findings import Finding
from align.ledger.sides import audit_side, not_audited
from align.report.blocks import BESIDE, CHANGED, blocks, shared, should
from align.report.document import View, render
from align.report.terminal import show_findings
from align.report.words import words_of
from align.result import parts
from align.result.schema import Result
from align.run.report import Report
from tests.unit.align.ledger.broken import CASES, Case, asked, ran
from tests.unit.align.ledger.launch import launch
from tests.unit.align.ledger.toy import Engine
from tests.unit.align.result import made


def report_with(directory: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> tuple[Report, Result]:
    """A run whose candidate's runs have these faults; ``""`` is a right one."""
    run = made.Run(directory, monkeypatch).go()
    cases = {case.name: case for case in CASES}
    engines = [ran(cases[name]) if name else Engine(asked()).run() for name in names]
    found = audit_side(launch(engines, ("",) * (len(names) - 1) + ("trace",)), "trace")
    run.report.ledgers = {"candidate": found, "reference": not_audited("switched off")}
    run.report.findings = tuple(found.findings("candidate"))
    run.report.verdict = "diverged" if found.wrongs else "aligned"
    return run.report, run.result()


def test_a_shifted_slot_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, result = report_with(tmp_path / "run", monkeypatch, "F01")
    text = render(result)
    evidence = report.findings[0].evidence
    seen, expected = evidence["seen"], evidence["expected"]
    for part in (
        "addresses its KV cache wrongly (wrong_slot)",
        "in numbered places, the *slots*; 4 slots in a row are a *block*, so that block b has the slots b × 4 to ",
        "With the numbers of this token, the slot that is right: `slot = block_table[7 // 4] * 4 + 7 % 4 = "
        f"{evidence['detail']['table'][1]} * 4 + 3 = {expected}`",
        f"Slot that was used: {seen}; right slot: {expected}",
        f"every wrong slot of this request is moved by as much: `{expected} +1 = {seen}`",
        f"The contradiction: by its block table position 7 of request r1 belongs in slot {expected}, where attention "
        f"looks for it; but it was written to slot {seen}, which is the place of position 0 of request r2: one slot "
        f"cannot hold both, and slot {expected} did not get it.",
        "Whose index it is: r1 position 7, in step 1, row 1 of the batch (from 0), rank 0",
        f"that of r2 is `[{evidence['tables']['victim'][0]}",
        f"| r1 | 1 | 2 | positions 0 to 6 | position 7 | 8 | {evidence['detail']['table'][0]}, ",
        "| r2 | 2 | ? | positions 0 to 21 | position 22 | 23 | ",  # no request of that name is in the case
        "Whose place it is: r2, position 0",
        "First wrong attention output: r1 in step 1, layer 0, which looks for its position 7",
        "Attention that is wrong because of it: r1 from position 7 on, r2 from position 22 on",
        f"| → ✗ | {seen} | r2 position 0 | r2 position 0 | r1 position 7 |",
        f"|  | {seen + 1} | r2 position 1 | r2 position 1 | r2 position 1 |",
        f"| → ✗ | {expected} | r1 position 7 | – | – |",
        "7 tokens written to a wrong place, or not at all, ",
        "Where it shows: steps 1–7; all 2 layers; rank 0",
        "✗ marks slots that lack the token which should stand there after the step",
    ):
        assert part in text, part
    assert "(run " not in text and "is a request of another run in the same engine" not in text


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kind_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, lang: str) -> None:
    _, result = report_with(tmp_path / "run", monkeypatch, "", case.name)
    text = render(result, lang)
    cause = text[text.index("1. **") : text.index("\n## ", text.index("1. **"))]
    assert "{" not in cause and "None" not in cause and case.kind in cause.replace("\\", "")
    assert ("Words: the KV cache" if lang == "en" else "术语") in cause


def test_a_call_and_other_runs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = report_with(tmp_path / "run", monkeypatch, "F01", "", "F01")
    (finding,) = report.findings
    plain = finding.to_dict()
    places = {"call": "pkg/fill_kv_cache.py:41", "made": "pkg/op_backend.py:154 Backend.update, pkg/other.py:7 build"}
    plain["evidence"] = {**plain["evidence"], **places}
    report.findings = (Finding.from_dict(plain),)
    run = made.Run(tmp_path / "other", monkeypatch)
    run.flow.report = report
    text = render(run.result())
    assert "rank 0; it was handed over at pkg/fill_kv_cache.py:41" in text
    maker = places["made"]
    assert f"Where the engine makes such indices, before they get there: {maker}" in text
    assert f"of step 1, at {maker}; they are used at {places['call']}. What must hold: `slot = " in text
    assert "The same kind shows in run 1 of this launch as well; all that is told here is of run 3." in text
    _, result = report_with(tmp_path / "third", monkeypatch, "", "F02")
    text = render(result)
    assert "r2 (run 1) position 23" in text and "is a request of another run in the same engine" in text


def test_what_only_another_run_shows_accuses_nothing_that_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, result = report_with(tmp_path / "run", monkeypatch, "F01", "")
    assert "It shows in run 1 of this launch only. What was recorded is run 2" in render(result)


def test_right_indices_are_counted_and_hidden_ones_are_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, result = report_with(tmp_path / "run", monkeypatch, "", "")
    text = render(result)
    total = report.ledgers["candidate"].records
    assert f"candidate: the KV cache's indices in {total} forwards of 2 runs" in text
    checked, unchecked = text.index("## What was checked"), text.index("## What was not checked")
    assert checked < text.index("the KV cache's indices in") < unchecked < text.index("switched off")
    assert result.ledger["candidate"].model_dump() == report.ledgers["candidate"].to_dict()
    assert result.ledger["reference"].observable is False
    old = result.model_copy(update={"ledger": {}})
    assert render(old).count("whether each token was written and read where its block table says") == 2


def test_the_summary_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = report_with(tmp_path / "run", monkeypatch, "", "F01")
    show_findings(Console(width=300), report, "lmdeploy", "vllm", True, False, "written")
    (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("cache indices"))
    total = report.ledgers["candidate"].records
    assert line == (
        f"cache indices: candidate 1 fault in {total} records of 2 runs; reference not observable (switched off)"
    )


def made_of(rows: list[dict[str, Any]]) -> parts.Finding:
    evidence = {"fault": "wrong_slot", "block": rows}
    return parts.Finding(path="A", kind="slots", evidence=evidence, summary="")


def test_of_a_large_block_the_accused_row_and_what_changed_are_shown() -> None:
    rows: list[dict[str, Any]] = [
        {"slot": 256 + at, "before": "–", "after": "x" if at in (5, 90) else "–", "lost": at == 99} for at in range(128)
    ]
    rows = [{**row, "offset": at, "accused": at == 64, "should": []} for at, row in enumerate(rows)]
    (shown,) = blocks(made_of(rows))
    assert (shown.number, shown.accused, shown.like) == (2, 256 + 64, 0)
    assert shown.left == 128 - 3 - (2 * BESIDE + 1)
    assert [row["offset"] for row in shown.rows] == [5, *range(64 - BESIDE, 64 + BESIDE + 1), 90, 99]
    (every,) = blocks(made_of([{**row, "after": "x"} for row in rows]))
    assert len(every.rows) <= CHANGED + 2 * BESIDE + 1 and every.left == 0 and every.like == 128 - len(every.rows)
    assert blocks(made_of([])) == []


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_whose_a_slot_should_be_is_told_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lang: str) -> None:
    claims = [
        {"request": "r0", "position": 5, "needed": True},
        {"request": "r1", "position": 5, "needed": True},
        {"request": "r2", "position": 9, "needed": False},
    ]
    say = View(made.Run(tmp_path / "run", monkeypatch).go().result(), words_of(lang)).say
    one = should({"should": claims}, say)
    expected = {"en": "r0, r1 position 5; later r2 position 9", "zh": "r0、r1 位置 5；之后为 r2 位置 9"}
    assert one == expected[lang]
    assert should({"should": []}, say) == "–"


def test_blocks_that_several_have_in_common_are_explained() -> None:
    rows: list[dict[str, Any]] = [{"table": [4, 2, 7], "shared": 2}, {"table": [4, 2, 9], "shared": 2}, {"table": [5]}]
    assert shared(rows) == ["2", "4"] and shared(rows[2:]) == []
