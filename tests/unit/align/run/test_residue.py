"""What three runs of one case say of state that outlives a run."""

from __future__ import annotations

import pytest

from adapters.base import Generation, TokenStep
from align.run.residue import left_behind
from align.run.stability import Stability, stability


def generated(*ids: int) -> tuple[Generation, ...]:
    return (Generation("r0", tuple(TokenStep(one, one, ((one, -0.1),)) for one in ids)),)


def against(*ids: int) -> Stability:
    """How well a run of these tokens repeats 5, 6, 7."""
    return stability("candidate", generated(5, 6, 7), generated(*ids))


SAME, OTHER, SHORT = (5, 6, 7), (5, 6, 9), (5, 6)


@pytest.mark.parametrize(
    ("second", "fresh", "said"),
    [
        (SAME, SAME, None),
        (OTHER, SAME, "token 2 is 7 in the first run and 9 in the second run of one engine"),
        (SHORT, SAME, "token 2 is 7 in the first run and no token in the second run"),
        (SAME, OTHER, "token 2 is 7 in both runs of one engine and 9 in a fresh engine"),
        (OTHER, OTHER, None),
    ],
)
def test_three_runs(second: tuple[int, ...], fresh: tuple[int, ...], said: str | None) -> None:
    found = left_behind(against(*second), against(*fresh), {"r0": 4})
    if said is None:
        assert found is None
        return
    assert found is not None and said in found.summary
    assert (found.path, found.kind, found.side) == ("UNLOCATED", "residue", "candidate")
    assert (found.requests, found.positions) == (("r0",), (6,))
