"""One request by itself: whether it shows what the batch showed (seed 003: a single request first)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from align.compare.tensors import TensorComparison
from align.findings import Finding
from align.walk.planner import accused_name


@dataclass(frozen=True)
class Pair:
    """Two requests of a batch that together show what neither does alone.

    Attributes:
        requests: their names, that which shows it first; empty if no pair that was tried does.
        tried: requests that the first one was run together with, in order.
        found: where their own headline points to; ``None`` if nothing is wrong.
    """

    requests: tuple[str, ...]
    tried: tuple[str, ...]
    found: str | None = None


@dataclass(frozen=True)
class Alone:
    """A request that ran without the others.

    Attributes:
        request: its name.
        checkpoint: what it was tried for.
        reproduced: the same thing is wrong at the same place.
        found: where its own headline points to; ``None`` if nothing is wrong.
        values: patterns of the values that its recording kept.
        bytes: by side, what its recording wrote.
        verified: the layers that were kept beside the accused one → verdict of the same checkpoint there.
        pair: where the request alone is right: whom it takes; ``None`` if nobody else was tried.
    """

    request: str
    checkpoint: str
    reproduced: bool
    found: str | None
    values: tuple[str, ...] = ()
    bytes: dict[str, int] | None = None
    verified: dict[int, str] | None = None
    pair: Pair | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        plain = asdict(self)
        return {**plain, "verified": {str(layer): state for layer, state in (self.verified or {}).items()}}


def same_place(
    checkpoint: str, headline: Finding | None, tensors: TensorComparison, findings: Sequence[Finding]
) -> bool:
    """Whether a comparison shows the headline of another one.

    Args:
        checkpoint: what the headline points to.
        headline: ``None`` where tensors differ and no finding says so.
    """
    if headline is not None and any(
        (one.path, one.kind, one.side, one.checkpoint, one.evidence.get("fault"))
        == (headline.path, headline.kind, headline.side, checkpoint, headline.evidence.get("fault"))
        for one in findings
    ):
        return True
    return accused_name(findings, tensors) == checkpoint
