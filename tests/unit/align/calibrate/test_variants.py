"""Runs that differ in one thing at a time, and which of them may be compared."""

from __future__ import annotations

import pytest

from align.calibrate.pairs import pairs_of
from align.calibrate.variants import variants
from align.case.schema import Numerics
from tests.unit.align.run import fakes, recordings


def planned(count: int, device: str = "simnpu") -> list[tuple[str, str]]:
    return [(one.name, one.change) for one in variants(recordings.case(), fakes.info(), count, device)]


def test_the_list_is_fixed() -> None:
    assert planned(5) == [
        ("run1", "as it is"),
        ("run2", "numerics swapped"),
        ("run3", "requests in reverse order, the last one late"),
        ("run4", "the candidate's block size 64"),
        ("run5", "random prompts 4"),
    ]
    assert planned(2) == planned(5)[:2]


def test_hardware_has_no_numerics() -> None:
    changes = planned(3, "ascend")
    assert [change for _, change in changes] == [
        "as it is",
        "requests in reverse order, the last one late",
        "the candidate's block size 64",
    ]
    assert {one.case.numerics for one in variants(recordings.case(), fakes.info(), 5, "ascend")} == {Numerics()}


def test_each_differs_as_it_says() -> None:
    one, two, three, four, five = variants(recordings.case(), fakes.info(), 5, "simnpu")
    assert one.numerics == {"candidate": "native", "reference": "fp32-internal"}
    assert two.numerics == {"candidate": "fp32-internal", "reference": "native"}
    first = [(request.name, request.token_ids, request.arrival) for request in one.case.requests]
    turned = [(request.name, request.token_ids) for request in three.case.requests]
    assert turned == [(name, ids) for name, ids, _ in reversed(first)]
    assert [request.arrival for request in three.case.requests] == [0, 3]
    assert (four.sets, four.allow) == (("candidate.block_size=64",), ("block_size",))
    assert not any(variant.sets or variant.allow for variant in (one, two, three, five))
    assert [len(request.token_ids) for request in five.case.requests] == [len(ids) for _, ids, _ in first]
    assert [request.token_ids for request in five.case.requests] != [ids for _, ids, _ in first]
    assert five == variants(recordings.case(), fakes.info(), 5, "simnpu")[4], "the same whenever it is planned"
    assert len({variant.case.to_text() for variant in (one, two, three, five)}) == 4


def test_a_single_request_is_never_late() -> None:
    case = recordings.case()
    alone = case.model_copy(update={"requests": case.requests[:1]})
    assert variants(alone, fakes.info(), 3, "simnpu")[2].case.requests[0].arrival == 0


def test_pairs_stay_within_a_group() -> None:
    labels = [label for label, _, _ in pairs_of(variants(recordings.case(), fakes.info(), 6, "simnpu"))]
    assert labels == [
        "run1 candidate / reference",
        "run2 candidate / reference",
        "run1 / run2 candidate",
        "run1 / run2 reference",
        "run3 candidate / reference",
        "run1 / run3 candidate",
        "run1 / run3 reference",
        "run4 candidate / reference",
        "run1 / run4 candidate",
        "run1 / run4 reference",
        "run5 candidate / reference",
        "run6 candidate / reference",
    ]


@pytest.mark.parametrize("count", [1, 7])
def test_as_many_as_asked(count: int) -> None:
    assert len(planned(count)) == count
