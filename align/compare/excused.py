"""Tokens behind near-ties of routers: the sides' experts differ there, so their tokens may, and none of them is wrong.

The tokens are compared before the tensors, and know nothing of experts. Where a recording shows that a token's row lies
behind a near-tie (:mod:`align.compare.routes`), nothing of that row is compared, its token neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from align.compare.tokens import Difference, Mode, RequestComparison, TokenComparison
from align.sentences import said, text_of


def behind_routers(
    comparisons: Mapping[str, TokenComparison], flipped: Mapping[Mode, Collection[tuple[str, int]]]
) -> dict[str, TokenComparison]:
    """The same comparisons, in which other tokens of these rows count as near-ties.

    A NaN stays a difference, and so does a side that stops earlier: neither is what another expert does.

    Args:
        comparisons: by mode.
        flipped: by mode, request and position of the rows behind near-ties (see ``TensorComparison.flipped``).
    """
    return {mode: _excused(one, flipped.get(one.mode, ())) for mode, one in comparisons.items()}


def _excused(compared: TokenComparison, hidden: Collection[tuple[str, int]]) -> TokenComparison:
    requests = tuple(_request(one, hidden) for one in compared.requests)
    diverged = any(one.outcome == "diverged" for one in requests)
    return replace(compared, requests=requests, verdict="diverged" if diverged else "aligned")


def _request(one: RequestComparison, hidden: Collection[tuple[str, int]]) -> RequestComparison:
    differences = tuple(_difference(difference, hidden) for difference in one.differences)
    if differences == one.differences:
        return one
    near = all(difference.near_tie for difference in differences)
    return replace(one, differences=differences, outcome="near_tie" if near else "diverged")


def _difference(one: Difference, hidden: Collection[tuple[str, int]]) -> Difference:
    if one.near_tie or one.kind != "token" or one.position is None:
        return one
    # A token is sampled from the row of the one before it.
    if (one.request, one.position - 1) not in hidden:
        return one
    told = said("tokens.routed", position=one.position - 1)
    return replace(one, near_tie=True, why=text_of(told), told=told)
