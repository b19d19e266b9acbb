"""Sequences that part, with both ranks' next calls; and the audit as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from align.collectives.audit import NO_RECORDS, audit_calls, with_records
from align.collectives.record.types import CollectiveCall, Place
from align.collectives.sequences import mismatches
from align.findings import Finding
from align.sentences import text_of
from tests.unit.align.collectives.calls import SITE, call

A, B = torch.ones(3, 4), torch.full((3, 4), 2.0)
O1, DOWN0 = "layers.1.attn.o", "layers.0.mlp.down"
Records = dict[int, list[CollectiveCall]]


def records(*names: str, wrong: str = "") -> Records:
    """All-reduces at these checkpoints; at ``wrong`` rank 1 has another result."""
    return {
        rank: [
            call(rank, "all_reduce", [(A, B)[rank]], [A + B + (name == wrong) * rank], at, name)
            for at, name in enumerate(names)
        ]
        for rank in (0, 1)
    }


def test_equal_sequences_match() -> None:
    assert mismatches(records(DOWN0, O1)) == {}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"operation": "all_gather"}, "operation"),
        ({"reduce": "max"}, "reduce"),
        ({"dtype": "float16"}, "dtype"),
        ({"given": ((3, 5),)}, "size"),
        ({"place": Place(1, 0, inside=(DOWN0,))}, "checkpoint"),
    ],
)
def test_the_first_difference_is_named_with_both_calls(change: dict[str, Any], what: str) -> None:
    given = records(DOWN0, O1)
    given[1][1] = replace(given[1][1], **change)
    (found,) = mismatches(given).values()
    assert (found.differ, found.rank, found.peer) == ((what,), 0, 1)
    assert found.calls == ((0, given[0][1]), (1, given[1][1])) and found.before == given[0][0]


def test_a_rank_that_skips_one_parts_at_its_next_call() -> None:
    given = records(DOWN0, O1)
    (found,) = mismatches({0: given[0], 1: records(O1)[1]}).values()
    assert found.differ == ("checkpoint",) and found.before is None


def test_a_call_that_a_rank_lacks_counts_if_that_rank_went_on() -> None:
    given = records(DOWN0, O1)
    assert mismatches({0: given[0], 1: given[1][:1]}) == {}, "its records may have been copied before it came there"
    later = call(1, "barrier", group=(1, 2), group_name="dp", place=Place(1, 1))
    (found,) = mismatches({0: given[0], 1: [*given[1][:1], later]}).values()
    assert (found.differ, found.theirs, found.mine) == (("count",), None, given[0][1])


def test_a_rank_that_waits_is_not_accused_because_the_others_steps_are_further() -> None:
    """Idle data-parallel groups go on to exchange what they have, at the last step of their own."""
    waits = [call(0, "all_gather", at=at, place=Place(3, 0)) for at in range(3)]
    works = [call(1, "all_gather", at=at, place=Place(3, 8)) for at in range(2)]
    assert mismatches({0: waits, 1: works}) == {}, "the third was not copied yet"


def _gather(rank: int, at: int, **more: Any) -> CollectiveCall:
    return call(rank, "all_gather", [(A, B)[rank]], [torch.cat([A, B])], at, **{"place": Place(3, 8), **more})


@pytest.mark.parametrize("tail", ["not begun", "not ended"])
def test_idle_calls_that_were_under_way_while_records_were_copied_are_left_out(tail: str) -> None:
    rank0 = [_gather(0, at, ended=True) for at in range(3)]
    rank1 = [_gather(1, at, ended=True) for at in range(2)]
    if tail == "not ended":
        rank1.append(_gather(1, 2, ended=False))
    audited = audit_calls({0: rank0, 1: rank1})
    assert [(row.operation, row.right, row.wrong, row.unseen) for row in audited.rows] == [("all_gather", 2, 0, 0)]
    assert audited.unseen == ()


@pytest.mark.parametrize(
    "change",
    [{"place": Place(3, 8, inside=(O1,))}, {"error": "RuntimeError: lost"}],
    ids=["inside of the model", "failed"],
)
def test_a_last_call_that_is_no_idle_one_stays_unseen(change: dict[str, Any]) -> None:
    rank0 = [_gather(0, 0, ended=True), _gather(0, 1, ended=True, **change)]
    audited = audit_calls({0: rank0, 1: [_gather(1, 0, ended=True)]})
    assert [(row.right, row.unseen) for row in audited.rows] == [(1, 1)]


def test_a_call_that_one_rank_lacks_before_others_that_all_made_stays_unseen() -> None:
    rank0 = [_gather(0, at, ended=True) for at in range(3)]
    audited = audit_calls({0: rank0, 1: [_gather(1, 0), _gather(1, 2)]})
    assert [(row.right, row.unseen) for row in audited.rows] == [(2, 1)]


def test_groups_are_independent_and_a_rank_without_records_is_not_accused() -> None:
    given = records(DOWN0)
    other = [call(rank, "barrier", group=(0, 2), group_name="dp") for rank in (0,)]
    assert mismatches({0: [*given[0], *other], 1: given[1]}) == {}


def test_the_audit_counts_by_operation_and_group() -> None:
    given = records(DOWN0, O1, wrong=O1)
    for rank in given:
        given[rank].append(call(rank, "barrier", at=2))
    found = audit_calls(given, size=10)
    assert [row.to_dict() for row in found.rows] == [
        {"operation": "all_reduce", "group": [0, 1], "right": 1, "wrong": 1, "unseen": 0, "ranks": [1]},
        {"operation": "barrier", "group": [0, 1], "right": 1, "wrong": 0, "unseen": 0, "ranks": []},
    ]
    assert (found.records, found.judged, found.faults, found.unseen) == (6, 3, 1, ())
    json.dumps(found.to_dict())


def test_of_runs_whose_tensors_were_not_kept_the_order_counts() -> None:
    given = records(DOWN0, O1)
    for rank, calls in given.items():
        place = Place(2, 0, inside=(DOWN0,))
        calls.append(call(rank, "all_reduce", at=2, place=place, values=False, tensors={}))
    assert [(row.right, row.unseen) for row in audit_calls(given, recorded={1}).rows] == [(2, 0)]
    assert [(row.right, row.unseen) for row in audit_calls(given).rows] == [(2, 1)]
    given[1][2] = replace(given[1][2], dtype="int64")
    found = audit_calls(given, recorded={1})
    assert len(found.mismatches) == 1 and found.faults == 1


def test_nothing_recorded_is_no_pass() -> None:
    found = audit_calls({0: [], 1: []}, ["the disk was full"])
    assert (found.observable, found.unseen) == (False, (NO_RECORDS, "the disk was full"))


def test_behind_a_mismatch_nothing_belongs_together() -> None:
    given = records(DOWN0, O1, DOWN0)
    given[1][1] = replace(given[1][1], dtype="float16")
    found = audit_calls(given)
    assert [(row.right, row.unseen) for row in found.rows] == [(1, 2)]
    assert len(found.mismatches) == 1 and "part before it (2 of them)" in found.unseen[0]


def test_a_wrong_relation_is_path_c_with_place_rank_and_call_site() -> None:
    (found,) = audit_calls(records(DOWN0, O1, wrong=O1)).findings("candidate")
    assert (found.path, found.kind, found.side, found.checkpoint) == ("C", "collective", "candidate", O1)
    assert (found.layer, found.ranks) == (1, (1,))
    call_ = found.evidence["collective"]
    assert (call_["operation"], call_["function"], call_["site"]) == (
        "all_reduce",
        "torch.distributed.all_reduce",
        [SITE],
    )
    assert SITE in found.next and text_of(found.evidence["sentence"], "zh")


def test_a_mismatch_is_path_c_with_both_call_sites() -> None:
    given = records(DOWN0, O1)
    given[1][1] = replace(given[1][1], dtype="float16", site=("engine/other.py:3 forward",))
    (found,) = audit_calls(given).findings("reference")
    assert (found.path, found.kind, found.checkpoint, found.ranks) == ("C", "order", O1, (0, 1))
    assert SITE in found.next and "engine/other.py:3 forward" in found.next
    assert "rank 1 calls all_reduce of float16" in found.summary


def test_findings_of_records_stand_before_what_lies_behind_them() -> None:
    behind = Finding("B", "unexplained", side="candidate", checkpoint="layers.2.attn.q", layer=2)
    inputs = Finding("INPUT", "token_ids")
    audits = {"candidate": audit_calls(records(DOWN0, O1, wrong=O1))}
    found = with_records([inputs, behind], audits)
    assert [(one.path, one.checkpoint) for one in found] == [("INPUT", None), ("C", O1), ("B", "layers.2.attn.q")]


def test_what_another_finding_tells_is_not_told_twice_but_gets_its_calls() -> None:
    known = Finding("C", "missing_reduce", side="candidate", checkpoint="layers.0.attn.o", layer=0)
    audits = {"candidate": audit_calls(records(DOWN0, O1, wrong=O1))}
    (found,) = with_records([known], audits)
    assert found.evidence["calls_here"] == 0 and found.evidence["calls_in_other_layers"] == [1]
    assert found.evidence["collective_elsewhere"]["checkpoint"] == O1
