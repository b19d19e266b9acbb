"""The rule of a paired run: what became of the first finding, what was changed, and what else differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.walk.paired import Confounder, Fault, Outcome, Pair, Ran, Tried, pair

NORM = Fault("B", "operator", "candidate", "layers.2.mlp_norm")
DOWN = Fault("B", "operator", "candidate", "layers.3.mlp.down")
FIX = Tried("candidate", "patch", "fix.py", "1f")
CONTROLS = {"version": {"candidate lmdeploy": "0.12.2"}, "condition": {"eager": "ok", "tp": "ok"}}
RIGHT = Ran("aligned", controls=CONTROLS)
STOPPED = Ran("not comparable", controls={"condition": {"eager": "false"}})


def wrong(*faults: Fault, **more: Any) -> Ran:
    return Ran("diverged", faults, **{"controls": CONTROLS, **more})


OUTCOMES: list[tuple[Ran, Ran, Outcome, tuple[Fault, ...], tuple[Fault, ...]]] = [
    (wrong(NORM), RIGHT, "mended", (NORM,), ()),
    (wrong(NORM), wrong(NORM), "not mended", (), ()),
    (wrong(NORM, DOWN), wrong(NORM), "not mended", (DOWN,), ()),
    (wrong(NORM, DOWN), wrong(DOWN), "moved", (NORM,), ()),
    (wrong(NORM), wrong(DOWN), "moved", (NORM,), (DOWN,)),
    (wrong(NORM), wrong(DOWN, NORM), "moved", (), (DOWN,)),
    (wrong(NORM), wrong(replace(NORM, side="reference")), "moved", (NORM,), (replace(NORM, side="reference"),)),
    (RIGHT, RIGHT, "same", (), ()),
    (RIGHT, wrong(NORM), "broken", (), (NORM,)),
    (STOPPED, wrong(NORM), "unknown", (), ()),
    (wrong(NORM), STOPPED, "unknown", (), ()),
    (STOPPED, STOPPED, "unknown", (), ()),
]


@pytest.mark.parametrize(("before", "after", "outcome", "gone", "appeared"), OUTCOMES)
def test_what_became_of_the_first_finding(
    before: Ran, after: Ran, outcome: Outcome, gone: tuple[Fault, ...], appeared: tuple[Fault, ...]
) -> None:
    found = pair(before, replace(after, tried=(FIX,)))
    assert (found.outcome, found.gone, found.appeared) == (outcome, gone, appeared)
    assert found.added == (FIX,) and found.changes == 1
    assert found.conclusive is (outcome != "unknown")


def test_another_kind_of_error_at_the_same_place_is_another_fault_only_if_both_are_known() -> None:
    eps, scale = (replace(NORM, fault=kind) for kind in ("eps", "scale"))
    assert pair(wrong(eps), wrong(scale)).outcome == "moved"
    assert pair(wrong(eps), wrong(eps)).outcome == pair(wrong(eps), wrong(NORM)).outcome == "not mended"


OPTION = Tried("candidate", "option", "x", "1")
CHANGES: list[tuple[tuple[Tried, ...], tuple[Tried, ...], int]] = [
    ((), (), 0),
    ((FIX,), (FIX,), 0),
    ((), (FIX,), 1),
    ((FIX,), (), 1),
    ((FIX,), (replace(FIX, value="2e"),), 1),
    ((OPTION,), (replace(OPTION, value="2"),), 1),
    ((FIX,), (FIX, FIX), 1),
    ((), (FIX, OPTION), 2),
    ((), (FIX, replace(FIX, side="reference")), 2),
    ((FIX,), (OPTION,), 2),
]


@pytest.mark.parametrize(("before", "after", "changes"), CHANGES)
def test_one_variable_at_most_may_change(before: tuple[Tried, ...], after: tuple[Tried, ...], changes: int) -> None:
    """Seed 000: two changed settings are inconclusive."""
    found = pair(wrong(NORM, tried=before), wrong(NORM, tried=after))
    assert found.changes == changes
    assert found.conclusive is (changes < 2)


def test_another_outcome_without_a_change_is_no_repair() -> None:
    for before, after in ((wrong(NORM), RIGHT), (RIGHT, wrong(NORM)), (wrong(NORM), wrong(DOWN))):
        found = pair(before, after)
        assert found.unsteady and not found.conclusive
    assert pair(wrong(NORM), wrong(NORM)).conclusive and pair(RIGHT, RIGHT).conclusive


def test_what_should_be_alike_and_is_not_is_listed() -> None:
    other = {"version": {"candidate lmdeploy": "0.13"}, "condition": {"eager": "ok", "tp": "unknown", "dp": "ok"}}
    found = pair(wrong(NORM), Ran("aligned", tried=(FIX,), controls=other))
    assert found.confounded == (
        Confounder("version", "candidate lmdeploy", "0.12.2", "0.13"),
        Confounder("condition", "tp", "ok", "unknown"),
        Confounder("condition", "dp", None, "ok"),
    )
    assert found.outcome == "mended" and not found.conclusive


def test_a_control_that_is_the_finding_itself_may_change() -> None:
    before = wrong(NORM, controls={"condition": {"norm_eps": "false", "eager": "ok"}})
    before = replace(before, effects=frozenset({("condition", "norm_eps")}))
    after = Ran("aligned", tried=(FIX,), controls={"condition": {"norm_eps": "ok", "eager": "ok"}})
    assert pair(before, after).conclusive


def test_what_an_early_end_did_not_reach_does_not_differ() -> None:
    assert pair(STOPPED, RIGHT).confounded == (Confounder("condition", "eager", "false", "ok"),)
    assert pair(Ran("not comparable"), RIGHT).confounded == ()


FAULTS = st.builds(
    Fault, st.sampled_from("AB"), st.sampled_from(["operator", "slots"]), st.sampled_from(["candidate", None]),
    st.sampled_from(["layers.0.mid", None]), st.sampled_from([None, "eps", "scale"]),
)  # fmt: skip
RANS = st.one_of(
    st.builds(lambda faults: Ran("diverged", tuple(faults)), st.lists(FAULTS, min_size=1, max_size=4)),
    st.sampled_from([Ran("aligned"), Ran("not comparable")]),
)


@given(RANS, RANS)
def test_the_rule_is_the_same_both_ways(before: Ran, after: Ran) -> None:
    there, back = pair(before, after), pair(after, before)
    opposite = {"mended": "broken", "broken": "mended"}
    assert back.outcome == opposite.get(there.outcome, there.outcome)
    assert (back.gone, back.appeared) == (there.appeared, there.gone)
    assert pair(before, before) == Pair("unknown" if before.verdict == "not comparable" else
                                        "same" if before.verdict == "aligned" else "not mended")  # fmt: skip
