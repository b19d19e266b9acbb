"""The audit of the collectives of one side."""

from __future__ import annotations

from pydantic import Field

from align.result.parts import Documented


class CollectiveRow(Documented):
    """The collectives of one operation in one group."""

    operation: str
    """all_reduce, all_gather, gather, reduce_scatter, all_to_all, broadcast, barrier; dispatch, combine (experts)."""
    group: list[int]
    """Global ranks."""
    right: int
    """How many did what they promise: a sum is the sum, a copy the copy, bit by bit where it must be."""
    wrong: int
    """How many did not."""
    unseen: int
    """How many could not be judged. None of them is a pass."""
    ranks: list[int] = Field(default_factory=list)
    """Ranks whose results were wrong."""


class CollectivesAudit(Documented):
    """Every recorded collective of one side, judged by what it promises. Its faults are findings of path C."""

    observable: bool
    """Whether any was recorded. If not, ``unseen`` says why, and nothing is known of them."""
    records: int = 0
    """Calls of ranks, of all runs of the launch."""
    rows: list[CollectiveRow] = Field(default_factory=list)
    """By operation and group, of the run whose tensors were kept; of all runs the order is judged."""
    faults: int = 0
    """Wrong ones, and groups whose ranks do not make the same calls. 0 is a pass of what was seen alone."""
    unseen: list[str] = Field(default_factory=list)
    """What could not be judged, and why. Nothing of it is a pass."""
    bytes: int = 0
    """Size of the records."""
