"""Findings of path C have the accused side's distributed code to read; others are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from align.compare.parallel_code import with_parallel_code
from align.findings import Finding


class Told:
    def __init__(self, *places: str) -> None:
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
