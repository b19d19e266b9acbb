"""Batch isolation: a request that is wrong in the batch and right alone is tried with one other request at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from align.findings import Finding
from align.walk.alone import Alone, Pair
from align.walk.planner import Look

#: Pairs that are tried at most: each is a replay of both sides.
TRIED = 4


def partners(request: str, headline: Finding | None, requests: Sequence[str]) -> tuple[str, ...]:
    """With whom a request is tried, the likeliest first: who wrote what it reads, whom the finding names, the others.

    Args:
        request: the one that is wrong in the batch.
        headline: what is wrong.
        requests: of the batch, in order.
    """
    evidence = {} if headline is None else headline.evidence
    accused = [str((evidence.get(place) or {}).get("request") or "") for place in ("writer", "victim")]
    named = () if headline is None else headline.requests
    # Neighbours in the batch before those far away: rows shift by one more often than by several.
    place = requests.index(request)
    near = sorted(requests, key=lambda one: (abs(requests.index(one) - place), requests.index(one)))
    order = dict.fromkeys((*accused, *named, *near))
    return tuple(one for one in order if one in requests and one != request)[:TRIED]


def find_pair(
    look: Look, headline: Finding | None, requests: Sequence[str], record: Callable[[Look], Alone]
) -> Pair | None:
    """Whom a request takes to be wrong; ``None`` if it has no company.

    Args:
        look: at the request alone.
        headline: what is wrong in the batch.
        requests: of the batch, in order.
        record: runs the requests of a look without the others, and compares.
    """
    request = look.requests[0]
    others = partners(request, headline, requests)
    if not others:
        return None
    if len(requests) == 2:
        return Pair((request, others[0]), ())
    for count, other in enumerate(others, 1):
        found = record(replace(look, requests=(request, other)))
        if found.reproduced:
            return Pair((request, other), others[:count], found.found)
    return Pair((), others)
