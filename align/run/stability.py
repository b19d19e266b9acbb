"""Does a side repeat itself? Two runs of the same requests in one engine, before engines are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from adapters.base import Generation
from align.errors import UserError
from align.sentences import Said, said, text_of


@dataclass(frozen=True)
class Unstable:
    """The first token that a side did not repeat; ``None`` where a run had already ended."""

    request: str
    index: int
    first: int | None
    second: int | None


@dataclass(frozen=True)
class Stability:
    """How well the second run of one side repeats the first.

    Attributes:
        side: its role.
        tokens: how many tokens were compared, over all requests.
        unstable: the earliest token that differs (by index, then by request order); ``None`` if all repeat.
        noise: largest difference of the logprobs of ids that both runs list, at steps with the same history: the
            run-to-run noise, 0.0 if the runs are bit-identical; ``None`` if nothing could be measured.
        near_ties: tokens that differ and that rounding explains, where the second run may compute otherwise than the
            first: what it finds in a prefix cache it does not compute.
    """

    side: str
    tokens: int
    unstable: Unstable | None
    noise: float | None
    near_ties: int = 0

    @property
    def stable(self) -> bool:
        return self.unstable is None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**asdict(self), "stable": self.stable}


def stability(side: str, first: Sequence[Generation], second: Sequence[Generation]) -> Stability:
    """Compare two runs of one side, request by request.

    Raises:
        ValueError: the runs hold different requests.
    """
    names = [generation.request for generation in first]
    again = {generation.request: generation for generation in second}
    if sorted(names) != sorted(again):
        raise ValueError(f"the {side}'s two runs hold different requests: {names} and {sorted(again)}")
    found: list[Unstable] = []
    gaps: list[float] = []
    tokens = 0
    for generation in first:
        before, after = generation.steps, again[generation.request].steps
        tokens += max(len(before), len(after))
        for index in range(max(len(before), len(after))):
            one = before[index] if index < len(before) else None
            two = after[index] if index < len(after) else None
            if one is not None and two is not None:
                ours, theirs = dict(one.top), dict(two.top)
                gaps += [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
            if one is None or two is None or one.chosen != two.chosen:
                left = None if one is None else one.chosen
                right = None if two is None else two.chosen
                found.append(Unstable(generation.request, index, left, right))
                break
    return Stability(
        side=side,
        tokens=tokens,
        unstable=min(found, key=lambda one: one.index, default=None),
        noise=max((gap for gap in gaps if isfinite(gap)), default=None),
    )


def refuse_unstable(results: Sequence[Stability]) -> None:
    """Stop before anything is judged if a side does not repeat itself.

    Raises:
        UserError: names side, request and token.
    """
    broken = [result for result in results if result.unstable is not None]
    if not broken:
        return
    told = said("stopped.unstable", sides=_sentences(broken))
    raise UserError(
        text_of(told),
        "make both sides deterministic, then run again: temperature 0 and top_k 1, warm-up off (it leaves entries "
        "in the KV cache), prefix caching off, no kernel that adds in varying order; if it stays, one request at a "
        "time shows whether the batch matters",
        told,
    )


def unstable_remarks(results: Sequence[Stability]) -> tuple[str, ...]:
    """The first token that a side did not repeat, where something else says why."""
    broken = [result for result in results if result.unstable is not None]
    return tuple(text_of(line) for line in _sentences(broken))


def _sentences(broken: Sequence[Stability]) -> list[Said]:
    lines = []
    for result in broken:
        token = result.unstable
        assert token is not None
        first, second = ((said("stopped.no_token") if one is None else one) for one in (token.first, token.second))
        lines.append(
            said(
                "stopped.unstable_side",
                side=result.side,
                request=token.request,
                index=token.index,
                first=first,
                second=second,
            )
        )
    return lines
