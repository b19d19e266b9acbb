"""What became of findings: by hand, and that nothing is lost or told twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from align.history.changes import Found, changes, found_in
from align.walk.paired import Fault
from tests.unit.align.history.nights import DEEPER, NORM, SLOT, found, result, states

WEIGHTS = Fault("B", "weights", "reference", "layers.1.mlp.gate")


def test_known_new_moved_and_fixed() -> None:
    told = changes([found(NORM, 2.0), found(WEIGHTS)], [found(SLOT), found(DEEPER), found(WEIGHTS, 3.0)])
    assert [(one.state, one.found.fault) for one in told] == [
        ("new", SLOT),
        ("moved", DEEPER),
        ("known", WEIGHTS),
    ]
    assert told[1].before == found(NORM, 2.0), "where it was"
    assert states(changes([found(NORM)], [])) == ["fixed"]
    assert states(changes([], [found(NORM)])) == ["new"]


def test_a_place_that_is_known_is_not_taken_for_a_move() -> None:
    told = changes([found(DEEPER), found(NORM)], [found(NORM)])
    assert [(one.state, one.found.fault) for one in told] == [("known", NORM), ("fixed", DEEPER)]


def test_against_a_run_that_is_not_comparable_nothing_is_new_or_fixed() -> None:
    assert states(changes(None, [found(NORM)])) == states(changes([found(NORM)], None)) == ["unknown"]


def test_a_fingerprint_holds_no_numbers_and_tells_places_apart() -> None:
    assert found(NORM, 1.0).fingerprint == found(NORM, 2.0).fingerprint
    others = [NORM, DEEPER, WEIGHTS, SLOT, replace(NORM, side="reference"), replace(SLOT, fault="stale")]
    assert len({found(one).fingerprint for one in others}) == len(others)
    assert found(NORM).fingerprint == found(replace(NORM, fault="factor")).fingerprint, "a fit may fail"


def test_a_found_comes_back() -> None:
    assert Found.from_dict(found(SLOT).to_dict()) == found(SLOT)


def test_findings_of_a_result() -> None:
    assert found_in(result(SLOT, NORM)) == (found(SLOT), found(NORM))
    assert found_in(result()) == ()
    assert found_in(result(verdict="not comparable", reason="no luck")) is None


faults = st.lists(
    st.builds(
        Fault,
        st.sampled_from(["A", "B"]),
        st.sampled_from(["operator", "slots"]),
        st.sampled_from(["candidate", None]),
        st.sampled_from(["embed", "layers.0.attn.o", None]),
    ),
    max_size=6,
)


@given(faults, faults)
def test_each_finding_is_told_once(before: list[Fault], after: list[Fault]) -> None:
    one, other = list(map(found, before)), list(map(found, after))
    told = changes(one, other)
    assert [change.after for change in told if change.after is not None] == other
    assert sorted(repr(change.before) for change in told if change.before) == sorted(map(repr, one))
    again = changes(other, other)
    assert states(again) == ["known"] * len(other)
