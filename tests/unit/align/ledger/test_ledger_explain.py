"""From wrongs to findings that a reader can check by hand."""

from __future__ import annotations

import json

import pytest

from align.findings import Finding
from align.ledger.explain import block_table, findings, sentence
from align.ledger.ledger import audit
from align.ledger.wrong import Page
from align.sentences import LANGUAGES, text_of
from tests.unit.align.ledger.broken import CASES, Case, ran


def found(name: str) -> Finding:
    case = next(case for case in CASES if case.name == name)
    engine = ran(case)
    (only,) = findings(audit(engine.records, engine.tokens).wrongs, "candidate")
    return only


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_fault_is_one_finding_of_path_a(case: Case) -> None:
    finding = found(case.name)
    assert (finding.path, finding.kind, finding.side) == ("A", "slots", "candidate")
    assert finding.evidence["fault"] == case.kind
    assert (finding.step, finding.layer) == (case.step, case.layer)
    assert finding.checkpoint == f"layers.{case.layer}.attn.kv_start_indices"
    assert json.loads(json.dumps(finding.to_dict()))["evidence"]["rows"]
    assert "?" not in finding.summary


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_fault_has_a_whole_sentence(case: Case, language: str) -> None:
    engine = ran(case)
    for wrong in audit(engine.records, engine.tokens).wrongs:
        text = text_of(sentence(wrong), language)
        assert "?" not in text and "{" not in text


def test_the_evidence_of_a_shifted_slot_can_be_recomputed() -> None:
    finding = found("F01")
    evidence = finding.evidence
    table = evidence["detail"]["table"]
    assert evidence["computed"] == f"slot = block_table[7 // 4] * 4 + 7 % 4 = {table[1]} * 4 + 3 = {table[1] * 4 + 3}"
    assert evidence["seen"] == evidence["expected"] + 1 == table[1] * 4 + 4
    assert (evidence["writer"]["request"], evidence["writer"]["position"]) == ("r1", 7)
    assert (evidence["victim"]["request"], evidence["victim"]["position"]) == ("r2", 0)
    (row,) = [row for row in evidence["block"] if row["accused"]]
    assert (row["before"], row["after"]) == ("r2 position 0", "r1 position 7")
    assert evidence["first_read"]["step"] == 1 and evidence["first_read"]["layer"] == 0
    assert evidence["detail"]["by"] == 1
    assert (
        "position 7 of request r1 is written to slot" in finding.summary
        and "instead of" in finding.summary
        and "is the place of position 0 of request r2" in finding.summary
    )


def test_the_padding_row_and_its_victim_are_told() -> None:
    finding = found("F02")
    assert (
        "padding row 3 of step 2 writes to slot" in finding.summary
        and "where position 22 of request r2 stands" in finding.summary
    )
    (row,) = [row for row in finding.evidence["block"] if row["accused"]]
    assert (row["before"], row["after"]) == ("r2 position 22", "padding")


def test_findings_of_one_kind_are_one_and_list_the_others() -> None:
    finding = found("F08")
    assert finding.evidence["further_total"] == 2 and set(finding.requests) == {"r0", "r1", "r2"}
    assert finding.evidence["detail"]["used"] == 8


def test_the_block_is_a_table() -> None:
    page = Page(5, (("r1", 0), ("r1", 1), ("", -1)), (("r1", 0), ("r0", 14), ("padding", -1)))
    assert block_table(page, 16).splitlines() == [
        "block 5   slot  before         after",
        "          15    r1 position 0  r1 position 0",
        "        > 16    r1 position 1  r0 position 14",
        "          17    –              padding",
    ]


def test_nothing_wrong_is_nothing_found() -> None:
    assert findings(()) == []
