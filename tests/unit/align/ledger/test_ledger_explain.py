"""From wrongs to findings that a reader can check by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from align.findings import Finding
from align.ledger.evidence import block_rows
from align.ledger.explain import findings, sentence
from align.ledger.ledger import audit
from align.ledger.wrong import Claim, Page
from align.sentences import LANGUAGES, text_of
from tests.unit.align.ledger.broken import CASES, Case, asked, decode, ran, shifted
from tests.unit.align.ledger.toy import Batch, Engine


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


def test_a_row_of_the_block_says_whose_it_is() -> None:
    should = ((Claim("r1", 0, True),), (Claim("r1", 1, True),), (Claim("r1", 2, False),))
    page = Page(5, (("r1", 0), ("r1", 1), ("", -1)), (("r1", 0), ("r0", 14), ("padding", -1)), should, frozenset({1}))
    rows = block_rows(page, 16)
    assert [(row["slot"], row["before"], row["after"]) for row in rows] == [
        (15, "r1 position 0", "r1 position 0"),
        (16, "r1 position 1", "r0 position 14"),
        (17, "–", "padding"),
    ]
    assert [row["accused"] for row in rows] == [row["lost"] for row in rows] == [False, True, False]
    assert [row["should"] for row in rows] == [[{"request": "r1", "position": at, "needed": at < 2}] for at in range(3)]


def test_the_block_tables_say_what_should_stand_in_both_blocks() -> None:
    """r1's second block is full: its next slot is the first of r2's, whose prompt of 22 has six blocks."""
    evidence = found("F01").evidence
    taken = {row["offset"]: row for row in evidence["block"]}
    assert [taken[at]["should"] for at in range(4)] == [
        [{"request": "r2", "position": at, "needed": True}] for at in range(4)
    ]
    assert [at for at, row in taken.items() if row["lost"]] == [0]
    home = {row["offset"]: row for row in evidence["home"]}
    assert [at for at, row in home.items() if row["accused"]] == [at for at, row in home.items() if row["lost"]] == [3]
    assert home[3]["should"] == [{"request": "r1", "position": 7, "needed": True}]
    assert (home[2]["after"], home[3]["before"], home[3]["after"]) == ("r1 position 6", "–", "–")
    assert evidence["followed"] == {"by": "shift", "computed": f"{evidence['expected']} +1 = {evidence['seen']}"}
    told = text_of(evidence["contradiction"])
    assert told == (
        f"by its block table position 7 of request r1 belongs in slot {home[3]['slot']}, where attention looks for it; "
        f"but it was written to slot {taken[0]['slot']}, which is the place of position 0 of request r2: one slot "
        f"cannot hold both, and slot {home[3]['slot']} did not get it"
    )


def test_the_requests_of_the_step_stand_with_lengths_and_tables() -> None:
    evidence = found("F01").evidence
    rows = {row["request"]: row for row in evidence["batch"]}
    assert list(rows) == ["r0", "r1", "r2"] and evidence["batch_total"] == 3
    spans = {name: (row["hit"], row["start"], row["end"], row["kv_len"]) for name, row in rows.items()}
    assert spans == {"r0": (0, 13, 14, 14), "r1": (0, 7, 8, 8), "r2": (0, 22, 23, 23)}
    assert rows["r1"]["table"] == evidence["detail"]["table"] and len(rows["r2"]["table"]) == 6


def test_blocks_that_two_requests_have_because_they_begin_alike_are_told() -> None:
    """r2 begins like r0, in three blocks of four tokens; each then goes on in blocks of its own."""
    requests = asked(prefix=True)
    requests[2].arrives = 2
    engine = Engine(requests, caching=True, fault=shifted).run()
    (finding, *_) = findings(audit(engine.records, engine.tokens).wrongs)
    later = next(record for record in engine.records if any(span.request == "r2" for span in record.spans))
    assert finding.step is not None and finding.step < later.step
    rows = {row["request"]: row for row in finding.evidence["batch"]}
    assert {name: row["shared"] for name, row in rows.items()} == {"r0": 0, "r1": 0}

    def late(engine: Engine, batch: Batch) -> None:
        if batch.row("r2") >= 0 and decode(batch):
            batch.slots[batch.row("r1")] += 1

    requests = asked(prefix=True)
    requests[2].arrives = 2
    engine = Engine(requests, caching=True, fault=late).run()
    (finding, *_) = findings(audit(engine.records, engine.tokens).wrongs)
    rows = {row["request"]: row for row in finding.evidence["batch"]}
    assert {name: (row["hit"], row["shared"]) for name, row in rows.items()} == {
        "r0": (0, 3), "r1": (0, 0), "r2": (12, 3),
    }  # fmt: skip
    assert rows["r0"]["table"][:3] == rows["r2"]["table"][:3]


@pytest.mark.parametrize(("name", "by"), [("A-22", "place"), ("F08", "size"), ("A-31", "position"), ("A-17", None)])
def test_the_slot_that_was_used_can_be_recomputed(name: str, by: str | None) -> None:
    evidence = found(name).evidence
    followed = evidence["followed"]
    assert (followed or {}).get("by") == by
    if followed:
        formula, numbers, result = followed["computed"].split(" = ")
        index, unit, offset = (int(part) for part in re.findall(r"\d+", numbers))
        assert index * unit + offset == int(result) == evidence["seen"]
        assert formula.startswith("block_table[")


def test_all_layers_that_are_handed_a_wrong_index_are_told() -> None:
    scope = found("F01").evidence["scope"]
    assert (scope["layers"], scope["layers_of"]) == ([0, 1], 2)
    assert found("layer").evidence["scope"]["layers"] == [1]
    assert found("A-9").evidence["scope"]["layers"] == [0, 1]  # seen by what is in the cache, layer by layer


def test_of_a_wrong_table_the_blocks_say_where_the_request_wrote_itself() -> None:
    """r1 is handed r2's row: what stands there is r2's, and r1's own block is another one."""
    evidence = found("A-17").evidence
    assert evidence["doubted"] == "r1"
    accused = next(row for row in evidence["block"] if row["accused"])
    assert [one["request"] for one in accused["should"]] == ["r2"] and not accused["lost"]
    home = next(row for row in evidence["home"] if row["accused"])
    assert home["should"] == [{"request": "r1", "position": 0, "needed": True}] and not home["lost"]
    assert home["slot"] == evidence["expected"] and home["after"] == "r1 position 0"
    told = text_of(evidence["contradiction"])
    assert told == (
        f"position 0 of request r1 was written to slot {home['slot']}, but attention was led to slot "
        f"{evidence['seen']} for it"
    )


def test_what_shows_is_counted_with_its_unit() -> None:
    """r1's shifted decodes: one token in each of seven steps, looked for in that step and in all later ones, and what
    they overwrote of others."""
    scope = found("F01").evidence["scope"]
    assert scope["written"] == 7 and scope["handed"] == 0 and scope["missed"] >= 7 * 8 // 2
    assert found("A-37").evidence["scope"]["handed"] > 0 == found("A-37").evidence["scope"]["missed"]


def test_nothing_wrong_is_nothing_found() -> None:
    assert findings(()) == []


def test_a_kind_is_told_by_the_recorded_run_although_an_earlier_ones_shows_in_it_too() -> None:
    """What run 1 left in the cache is found in run 2 again, which has the same fault itself."""
    engine = ran(next(case for case in CASES if case.name == "F01"))
    (own,) = audit(engine.records, engine.tokens).wrongs
    earlier, own = replace(own, run=1, runs=(1, 2), step=0), replace(own, run=2, runs=(2,))
    (finding,) = findings([earlier, own], "candidate", recorded=2)
    assert (finding.evidence["run"], finding.step, finding.evidence["elsewhere"]) == (2, own.step, False)
    (finding,) = findings([earlier], "candidate", recorded=2)
    assert finding.evidence["run"] == 1 and finding.evidence["elsewhere"] is False
    (finding,) = findings([earlier, own], "candidate")
    assert finding.evidence["run"] == 1, "the first in time"
