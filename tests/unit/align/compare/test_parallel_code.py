"""Findings of path C have the accused side's distributed code to read; others are left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from align.compare.parallel_code import with_parallel_code
from align.findings import Finding


class Told:
    structure: Any = None

    def __init__(self, *places: str, experts: int | None = None) -> None:
        if experts is not None:
            self.structure = SimpleNamespace(experts=experts)
        self.manifest: dict[str, Any] = {
            "observations": [{"name": "parallel_code", "value": list(places), "where": "x"}]
        }


@pytest.mark.parametrize(("side", "sides"), [("candidate", ["candidate"]), (None, ["candidate", "reference"])])
def test_the_accused_side_or_both(side: str | None, sides: list[str]) -> None:
    traces: Any = {"candidate": Told("a.py:1 f"), "reference": Told("b.py:2 g")}
    call = {"what": "Impl class", "place": "c.py:3"}
    finding = Finding("C", "collective", side, evidence={"read": {"candidate": [call]}})
    (found,) = with_parallel_code([finding], traces)
    read = found.evidence["read"]
    assert list(read) == sides
    assert read["candidate"] == [call, {"what": "distributed code", "place": "a.py:1 f"}]


def test_others_and_recordings_without_it_are_left_alone() -> None:
    traces: Any = {"candidate": Told("a.py:1 f"), "reference": Told()}
    other = Finding("B", "operator", "candidate")
    reference = Finding("C", "collective", "reference")
    assert with_parallel_code([other, reference], traces) == [other, reference]


EXPERTS, SUMS = "device/ascend.py:238 AscendMoEForwardDPTP.reduce_scatter", "linear.py:22 DlinferLinearImpl.forward"


@pytest.mark.parametrize(
    ("kind", "experts", "places"),
    [
        ("missing_reduce", 0, [SUMS]),
        ("missing_reduce", 8, [EXPERTS, SUMS]),
        ("missing_reduce", None, [EXPERTS, SUMS]),
    ],
)
def test_a_dense_model_has_no_code_of_experts_to_read(kind: str, experts: int | None, places: list[str]) -> None:
    traces: Any = {"candidate": Told(EXPERTS, SUMS, experts=experts)}
    (found,) = with_parallel_code([Finding("C", kind, "candidate")], traces)
    assert [one["place"] for one in found.evidence["read"]["candidate"]] == places
