"""What tokens and findings say together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from align.compare.noise import NoisePolicy
from align.compare.tokens import Difference, TokenComparison, compare_tokens
from align.findings import Finding
from align.run.verdict import overall_verdict, tokens_verdict
from tests.unit.align.run import fakes


def compared(*differences: tuple[str, int, bool]) -> TokenComparison:
    """A comparison with these ``(request, index, near-tie)`` differences."""
    same = [fakes.generation("r0", 1)]
    base = compare_tokens(same, same, mode="free", policy=NoisePolicy(0.1, 1.0))
    found = tuple(
        Difference(
            request=name, index=index, position=None, kind="token", candidate_id=1, reference_id=2, candidate_top=(),
            reference_top=(), candidate_margin=None, reference_margin=None, candidate_margin_at_least=None,
            reference_margin_at_least=None, noise=0.0, tolerance=0.1, near_tie=tie, why="",
        )
        for name, index, tie in differences
    )  # fmt: skip
    request = replace(base.requests[0], differences=found)
    verdict: Any = "aligned" if all(tie for _, _, tie in differences) else "diverged"
    return replace(base, verdict=verdict, requests=(request,))


@pytest.mark.parametrize(
    ("free", "replay", "verdict"),
    [
        ([], None, "aligned"),
        ([("a", 1, True)], None, "aligned"),
        ([("a", 1, False)], None, "diverged"),
        ([("a", 1, False)], [("a", 1, True)], "aligned"),
        ([("a", 1, True)], [], "aligned"),
        ([("a", 1, True)], [("a", 1, False)], "diverged"),
        ([], [("a", 5, False)], "diverged"),
        ([("a", 1, False)], [], "diverged"),
        ([("a", 1, False)], [("a", 2, True)], "diverged"),
        ([("a", 1, False)], [("b", 1, True)], "diverged"),
        ([("a", 1, False), ("b", 2, True)], [("a", 1, True), ("b", 2, True), ("b", 3, True)], "aligned"),
    ],
)
def test_both_runs_decide_together(free: Any, replay: Any, verdict: str) -> None:
    comparisons = {"free": compared(*free)} | ({} if replay is None else {"replay": compared(*replay)})
    assert tokens_verdict(comparisons) == verdict
    assert overall_verdict(comparisons, ()) == verdict


def test_a_finding_is_a_divergence_although_the_tokens_agree() -> None:
    found = Finding("B", "weights", side="candidate", checkpoint="layers.1.mlp.up")
    assert overall_verdict({"free": compared()}, (found,)) == "diverged"
    assert overall_verdict({}, (found,)) == "diverged"
    assert overall_verdict({}, ()) == "aligned", "files without tokens"
