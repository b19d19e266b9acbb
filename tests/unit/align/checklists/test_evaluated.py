"""The lists as a whole: counts, a clean run, results of an earlier version, and evaluation anew."""

from __future__ import annotations

from align.checklists.evaluate import STATES, evaluate, with_checklists
from align.result.schema import Result
from tests.unit.align.checklists import handmade as made
from tests.unit.align.checklists.handmade import result


def states(found: Result) -> dict[str, str]:
    return {one.id: one.state for each in evaluate(found) for one in each.items}


def test_a_clean_run_fails_nothing_and_counts_add_up() -> None:
    found = evaluate(result())
    assert [(one.name, len(one.items)) for one in found] == [("quick", 17), ("alignment", 10), ("troubleshooting", 8)]
    for one in found:
        assert list(one.counts) == list(STATES) and sum(one.counts.values()) == len(one.items)
        assert one.counts["failed"] == 0
        assert all(item.count for item in one.items if item.state == "ok")


def test_one_fault_fails_its_items_alone() -> None:
    run = result(findings=[made.fault("layer_length")], ledger=made.ledger(1), alone=made.alone())
    assert [name for name, state in states(run).items() if state == "failed"] == ["000-Q17"]


def test_they_are_the_same_whenever_they_are_evaluated() -> None:
    once = with_checklists(result())
    assert with_checklists(once) == once
    again = Result.model_validate_json(once.model_dump_json())
    assert with_checklists(again) == once


def test_a_result_of_an_earlier_version_says_so_and_passes_nothing_that_it_lacks() -> None:
    old = {side: {**one, "looked": None} for side, one in made.ledger().items()}
    found = result(ledger=old, recordings={}, tensors=made.tensors(layers=[]))
    lacking = ("000-Q03", "000-Q08", "000-Q17", "003-CK-06", "003-CK-07", "003-TS-04", "003-TS-07", "003-TS-08")
    assert {states(found)[name] for name in lacking} == {"not observable"}
    said = {one.id: one.what for each in evaluate(found) for one in each.items}
    assert "earlier version" in said["000-Q03"] and "earlier version" in said["003-CK-06"]


def test_a_ladder_or_a_replay_that_comes_later_changes_what_is_said() -> None:
    case, findings = made.case("tp2 dp2 ep1"), [made.finding()]
    before = with_checklists(result(case=case, findings=findings))
    after = with_checklists(Result.model_validate({**before.model_dump(), "ladder": made.ladder("introduced", "dp")}))
    ids = ("003-CK-04", "003-TS-03")
    assert [states(before)[name] for name in ids] == ["failed", "not observable"]
    assert [states(after)[name] for name in ids] == ["ok", "failed"]
