"""How the tokens of a step reach the experts of a model, and which rows of it a rank then holds.

With several ranks an engine chooses a method for each forward. Its tensors between router and sum hold other rows than
those of the step: with those of other data-parallel groups in front, or the part that this rank takes of its group's.
A :class:`Dispatch` says which are the step's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Names of the methods, alike for both engines.
ALL_GATHER, MC2, ALL_TO_ALL = "all_gather", "mc2", "all_to_all"
#: What is held by the rows that a rank computes, and what each rank holds whole behind the exchange.
ROUTED = ("moe.topk_ids", "moe.topk_weights")
SUMMED = "moe.routed"


class Part(NamedTuple):
    """Rows of an engine's tensor: ``rows`` of them behind the first ``skip`` are rows ``first …`` of the step."""

    skip: int
    first: int
    rows: int


@dataclass(frozen=True)
class Dispatch:
    """Of one forward on one rank.

    Attributes:
        method: :data:`ALL_GATHER`, :data:`MC2` or :data:`ALL_TO_ALL`; empty where it is not known.
        tokens: of this rank's group.
        padded: tokens that the engine makes of them, the same on every rank of the group.
        parts: kind → which rows of the engine's tensor are the step's; a kind that is not in it begins with all.
        whole: kinds of which a rank holds the sum and not a summand.
    """

    method: str = ""
    tokens: int = 0
    padded: int = 0
    parts: Mapping[str, Part] = field(default_factory=dict)
    whole: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, as the trace keeps it; ``parts`` are ``[first, rows]`` of the step's rows."""
        return {
            "method": self.method,
            "tokens": self.tokens,
            "padded": self.padded,
            "parts": {kind: [part.first, part.rows] for kind, part in self.parts.items()},
            "whole": list(self.whole),
        }


def divided(method: str, tokens: int, padded: int, ranks: int, place: int) -> Dispatch:
    """The ranks of a group divide its rows, pads behind them, and hold the sums of all of them afterwards.

    Args:
        ranks: of the group; ``place`` is this one's.
    """
    each, more = divmod(padded, ranks)  # as torch.tensor_split
    start = place * each + min(place, more)
    end = start + each + (place < more)
    part = Part(0, min(start, tokens), max(0, min(end, tokens) - start))
    parts = dict.fromkeys(ROUTED, part) if ranks > 1 else {}
    return Dispatch(method, tokens, padded, parts, (SUMMED,))


def gathered(tokens: int, padded: int, skip: int, kinds: tuple[str, ...], whole: bool) -> Dispatch:
    """The groups' rows stand one after the other, ``skip`` of them before this group's.

    Args:
        kinds: whose rows they are; other kinds hold this group's alone.
        whole: whether a rank holds the sum over all ranks afterwards.
    """
    part = Part(skip, 0, tokens)
    return Dispatch(ALL_GATHER, tokens, padded, dict.fromkeys(kinds, part), (SUMMED,) if whole else ())
