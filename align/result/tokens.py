"""The tokens of a result, and how they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from adapters.base import Generation
from align.compare.tokens import Difference, RequestComparison, TokenComparison
from align.result.parts import Documented, Number
from align.result.plain import plain
from align.run.verdict import tokens_verdict

#: By side, what each request got.
Generated = Mapping[str, Sequence[Generation]]
#: Tokens of a side that a difference shows.
TOP = 5


class Chance(Documented):
    """One token that a side listed among its best."""

    id: int
    """Of the token."""
    logprob: Number
    """Natural-log probability."""


class TokenDifference(Documented):
    """One place where the sides prefer different tokens."""

    request: str
    """Its request."""
    index: int
    """Of the generated token, from 0."""
    position: int | None
    """In the sequence: prompt length + index."""
    kind: Literal["token", "length", "nonfinite"]
    """Different ids, an end on one side alone, or a logprob that is no number."""
    candidate_id: int | None
    """Null where the side has no token."""
    reference_id: int | None
    """Null where the side has no token."""
    candidate_margin: Number | None
    """How much the candidate prefers its own id, in natural-log probability; null if it lists only one of the two."""
    reference_margin: Number | None
    """The same of the reference."""
    tolerance: Number
    """What the measured noise allows, in natural-log probability."""
    near_tie: bool
    """Both margins are known and within the tolerance: no finding."""
    why: str
    """Reason, in words."""
    told: dict[str, Any] = Field(default_factory=dict)
    """The same as data; empty in results of an earlier version."""
    top: dict[str, list[Chance]] = Field(default_factory=dict)
    """By side: the tokens that it listed there, the best first; empty in results of an earlier version."""


class TokenRequest(Documented):
    """One request's tokens."""

    request: str
    """Its name."""
    outcome: Literal["equal", "near_tie", "diverged"]
    """Equal, different by near-ties only, or really different."""
    equal: int
    """Tokens that agree before the first difference (replay: in all)."""
    compared: int
    """Tokens with the same history on both sides, the first differing one included."""
    total: int
    """Tokens of the longer side."""
    ids: dict[str, list[int]] = Field(default_factory=dict)
    """By side: the generated ids of the free run; empty elsewhere, and in results of an earlier version."""


class TokenRun(Documented):
    """The tokens of one run of both sides."""

    verdict: Literal["aligned", "diverged"]
    """Of the tokens alone."""
    noise: Number | None
    """Largest difference of logprobs that both sides list, in natural-log probability; null if none was shared."""
    floor: float
    """Noise that is always allowed, in the same unit."""
    cap: float
    """Noise that is never exceeded, in the same unit."""
    noise_above_cap: bool
    """The logprobs differ by more than rounding explains, whatever the tokens say."""
    requests: list[TokenRequest]
    """In the reference's order."""
    differences: list[TokenDifference]
    """All that are comparable, request by request."""


class Tokens(Documented):
    """Greedy tokens."""

    verdict: Literal["aligned", "diverged"]
    """Of both runs together."""
    total: int
    """Tokens of the free run, over all requests."""
    first: TokenDifference | None
    """The earliest real difference; null if there is none."""
    free: TokenRun
    """Each side feeds its own tokens back."""
    replay: TokenRun | None = None
    """Both sides are forced along the reference's tokens; null if that was not done."""


def first_difference(comparisons: Mapping[str, TokenComparison]) -> Difference | None:
    """The earliest difference that is no near-tie in any run, by token, then by request; ``None`` if there is none,
    or if no tokens were compared.
    """
    free = comparisons.get("free")
    if free is None:
        return None
    replay = comparisons.get("replay", free)
    ties = {(one.request, one.index) for one in (*free.near_ties, *replay.near_ties)}
    real = [one for one in free.differences if (one.request, one.index) not in ties]
    real += [one for one in replay.differences if not one.near_tie]
    return min(real, key=lambda one: one.index, default=None)


def tokens_of(
    comparisons: Mapping[str, TokenComparison],
    generated: Generated | None = None,
    replayed: Generated | None = None,
) -> Tokens | None:
    """``None`` if no tokens were compared.

    Args:
        generated, replayed: by side, what the free run and the one along the same tokens gave.
    """
    free = comparisons.get("free")
    if free is None:
        return None
    first = first_difference(comparisons)
    replay = comparisons.get("replay")
    return Tokens(
        verdict=tokens_verdict(comparisons),
        total=sum(request.total for request in free.requests),
        first=None if first is None else _difference(first, generated or {}),
        free=_run(free, generated or {}),
        replay=None if replay is None else _run(replay, replayed or {}, ids=False),
    )


def _run(comparison: TokenComparison, generated: Generated, ids: bool = True) -> TokenRun:
    known = generated if ids else {}  # forced ones are the reference's
    of_side = {side: {one.request: list(one.token_ids) for one in found} for side, found in known.items()}
    return TokenRun(
        verdict=comparison.verdict,
        noise=plain(comparison.noise),
        floor=comparison.policy.floor,
        cap=comparison.policy.cap,
        noise_above_cap=comparison.noise_above_cap,
        requests=[_request(request, of_side) for request in comparison.requests],
        differences=[_difference(one, generated) for one in comparison.differences],
    )


def _request(request: RequestComparison, ids: Mapping[str, Mapping[str, list[int]]]) -> TokenRequest:
    return TokenRequest(
        request=request.request,
        outcome=request.outcome,
        equal=request.compared - len({one.index for one in request.differences}),
        compared=request.compared,
        total=request.total,
        ids={side: found[request.request] for side, found in ids.items() if request.request in found},
    )


def _difference(one: Difference, generated: Generated) -> TokenDifference:
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
        told=plain(dict(one.told)),
        top={side: top for side, found in generated.items() if (top := _top(found, one))},
    )


def _top(generations: Sequence[Generation], one: Difference) -> list[Chance]:
    """The best tokens of a side at a difference; empty where it has no token there."""
    steps = next((found.steps for found in generations if found.request == one.request), ())
    listed = steps[one.index].top[:TOP] if one.index < len(steps) else ()
    return [Chance.model_validate({"id": token, "logprob": plain(logprob)}) for token, logprob in listed]
