"""Findings say what is wrong in one sentence and survive JSON."""

from __future__ import annotations

import json

import pytest

from align.findings import PATHS, Finding

FULL = Finding(
    "B",
    "weights",
    side="candidate",
    checkpoint="layers.1.mlp.down",
    layer=1,
    phase="decode",
    step=3,
    requests=("r0", "r2"),
    positions=(5, 6, 7, 8),
    ranks=(0, 1),
    evidence={"what": "row 12 differs", "rows": [12]},
    next="see how it is loaded",
)


def test_the_summary_is_one_sentence() -> None:
    assert FULL.summary == (
        "Path B (operator precision): weights of the candidate at layers.1.mlp.down in decode for r0, r2 "
        "at position 5, 6, 7: row 12 differs."
    )
    assert Finding("UNLOCATED", "tokens").summary == "UNLOCATED (not located): tokens."


@pytest.mark.parametrize("finding", [FULL, *(Finding(path, "kind") for path in PATHS)])  # type: ignore[arg-type]
def test_json_and_back(finding: Finding) -> None:
    plain = json.loads(json.dumps(finding.to_dict()))
    assert plain["summary"] == finding.summary
    assert Finding.from_dict(plain) == finding


def test_the_one_worst_place_is_called_so() -> None:
    """Somebody read it as all that is affected."""
    finding = Finding("B", "operator", "candidate", "layers.2.mlp_norm", 2, requests=("r3",), positions=(90,))
    assert finding.summary == (
        "Path B (operator precision): operator of the candidate at layers.2.mlp_norm, worst for r3 at position 90."
    )


def test_no_second_place_stands_before_those_of_the_evidence() -> None:
    """The largest element and the worst row are two places; each is named with its test."""
    what = "rms_norm: an element is off by 5.11 roundings (r1 position 6, channel 156); r3 position 90 is 1.01 times"
    finding = Finding("B", "operator", "candidate", "x", requests=("r3",), positions=(90,), evidence={"what": what})
    assert finding.summary == f"Path B (operator precision): operator of the candidate at x: {what}."
