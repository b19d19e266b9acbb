"""Which part of each checkpoint a tensor-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from align.checkpoints.table import Structure, kinds


@dataclass(frozen=True)
class Shard:
    """The part of an axis that a rank holds: elements ``start … start + count - 1`` of ``total``."""

    start: int
    count: int
    total: int


def split(total: int, tp: int, tp_rank: int) -> Shard:
    """The part of ``total`` elements: equal parts, or copies of single ones where there are more ranks.

    Raises:
        ValueError: neither divides the other.
    """
    if total % tp == 0:
        count = total // tp
        return Shard(tp_rank * count, count, total)
    if tp % total == 0:
        return Shard(tp_rank // (tp // total), 1, total)
    raise ValueError(f"{total} elements cannot be shared by {tp} ranks")


def shards(structure: Structure, tp_rank: int) -> dict[str, Shard]:
    """The part that a rank holds of every kind that tensor parallelism splits, by kind; empty without it."""
    if structure.tp == 1:
        return {}
    return {
        name: split(structure.size(kind.shard), structure.tp, tp_rank)
        for name, kind in kinds().items()
        if kind.shard not in ("", "partial") and structure.has(kind)
    }
