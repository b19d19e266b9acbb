"""Next tokens of data-parallel ranks that serve the same request (seed 000, known problems).

Where the ranks of a group compute the same prompt, a collective that adds in another order each time may make them
choose different tokens; from then on their caches part. So the tokens of equal requests are compared step by step, on
each side by itself. Requests of their own need no common token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adapters.base import Generation
from align.case.schema import CaseRequest
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens


@dataclass(frozen=True)
class Parted:
    """Two equal requests on different ranks whose tokens part.

    Attributes:
        requests, ranks, tokens: of the two, the first rank's first; a token is ``None`` where one has none.
        step: number of the generated token, from 0.
        near_tie: both tokens were as likely as rounding makes them.
    """

    requests: tuple[str, str]
    ranks: tuple[int, int]
    step: int
    tokens: tuple[int | None, int | None]
    near_tie: bool


def twins(requests: Sequence[CaseRequest]) -> list[tuple[CaseRequest, CaseRequest]]:
    """Requests with the same prompt on another data-parallel rank, each with the first such request."""
    first: dict[tuple[int, ...], CaseRequest] = {}
    found = []
    for one in requests:
        same = first.setdefault(one.token_ids, one)
        if same.dp_rank != one.dp_rank:
            found.append((same, one))
    return found


def parted(requests: Sequence[CaseRequest], generations: Mapping[str, Generation], policy: NoisePolicy) -> list[Parted]:
    """Where the tokens of equal requests part, the earliest step first.

    Args:
        generations: of one side, by request.
        policy: of the near-tie rule.
    """
    found = []
    for one, other in twins(requests):
        if one.name not in generations or other.name not in generations:
            continue
        ours, theirs = generations[one.name], generations[other.name]
        length = min(len(ours.steps), len(theirs.steps))  # one may have been asked for more
        pair = [Generation(one.name, side.steps[:length]) for side in (ours, theirs)]
        for apart in compare_tokens(pair[:1], pair[1:], mode="free", policy=policy).differences[:1] if length else ():
            tokens = apart.candidate_id, apart.reference_id
            ranks = one.dp_rank, other.dp_rank
            found.append(Parted((one.name, other.name), ranks, apart.index, tokens, apart.near_tie))
    return sorted(found, key=lambda one: one.step)
