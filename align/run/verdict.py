"""From what was found to one word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from align.compare.tokens import TokenComparison
from align.findings import Finding

Verdict = Literal["aligned", "diverged", "not comparable"]


def tokens_verdict(comparisons: Mapping[str, TokenComparison]) -> Literal["aligned", "diverged"]:
    """What the free run and, if there is one, the replay say together.

    A replay measures more, so it decides about every flip that it repeats. What parted in the free run and is no flip
    of the replay is not explained by it, and stays a difference.
    """
    free = comparisons["free"]
    replay = comparisons.get("replay", free)
    ties = {(difference.request, difference.index) for difference in (*free.near_ties, *replay.near_ties)}
    unexplained = any((difference.request, difference.index) not in ties for difference in free.differences)
    return "diverged" if unexplained or replay.verdict == "diverged" else "aligned"


def overall_verdict(comparisons: Mapping[str, TokenComparison], findings: Sequence[Finding]) -> Verdict:
    """Any finding is a divergence, also when the tokens of these prompts happen to agree."""
    if findings:
        return "diverged"
    return tokens_verdict(comparisons) if comparisons else "aligned"
