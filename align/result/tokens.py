"""The tokens of a result."""

from __future__ import annotations

from collections.abc import Mapping

from align.compare.tokens import Difference, RequestComparison, TokenComparison
from align.result.parts import TokenDifference, TokenRequest, TokenRun, Tokens
from align.result.plain import plain
from align.run.verdict import tokens_verdict


def first_difference(comparisons: Mapping[str, TokenComparison]) -> Difference | None:
    """The earliest difference that is no near-tie in any run, by token, then by request; ``None`` if there is none."""
    free = comparisons["free"]
    replay = comparisons.get("replay", free)
    ties = {(one.request, one.index) for one in (*free.near_ties, *replay.near_ties)}
    real = [one for one in free.differences if (one.request, one.index) not in ties]
    real += [one for one in replay.differences if not one.near_tie]
    return min(real, key=lambda one: one.index, default=None)


def tokens_of(comparisons: Mapping[str, TokenComparison]) -> Tokens | None:
    """``None`` if no tokens were compared."""
    free = comparisons.get("free")
    if free is None:
        return None
    first = first_difference(comparisons)
    replay = comparisons.get("replay")
    return Tokens(
        verdict=tokens_verdict(comparisons),
        total=sum(request.total for request in free.requests),
        first=None if first is None else _difference(first),
        free=_run(free),
        replay=None if replay is None else _run(replay),
    )


def _run(comparison: TokenComparison) -> TokenRun:
    return TokenRun(
        verdict=comparison.verdict,
        noise=plain(comparison.noise),
        floor=comparison.policy.floor,
        cap=comparison.policy.cap,
        noise_above_cap=comparison.noise_above_cap,
        requests=[_request(request) for request in comparison.requests],
        differences=[_difference(one) for one in comparison.differences],
    )


def _request(request: RequestComparison) -> TokenRequest:
    return TokenRequest(
        request=request.request,
        outcome=request.outcome,
        equal=request.compared - len({one.index for one in request.differences}),
        compared=request.compared,
        total=request.total,
    )


def _difference(one: Difference) -> TokenDifference:
    return TokenDifference(
        request=one.request,
        index=one.index,
        position=one.position,
        kind=one.kind,
        candidate_id=one.candidate_id,
        reference_id=one.reference_id,
        candidate_margin=plain(one.candidate_margin),
        reference_margin=plain(one.reference_margin),
        tolerance=plain(one.tolerance),
        near_tie=one.near_tie,
        why=one.why,
    )
