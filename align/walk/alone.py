"""One request by itself: whether it shows what the batch showed (seed 003: a single request first)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from align.compare.tensors import TensorComparison
from align.findings import Finding
from align.walk.planner import accused_name


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
    """

    request: str
    checkpoint: str
    reproduced: bool
    found: str | None
    values: tuple[str, ...] = ()
    bytes: dict[str, int] | None = None
    verified: dict[int, str] | None = None

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
        (one.path, one.kind, one.side, one.checkpoint) == (headline.path, headline.kind, headline.side, checkpoint)
        for one in findings
    ):
        return True
    return accused_name(findings, tensors) == checkpoint
