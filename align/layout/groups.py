"""Which global ranks make up which group of a layout; ``tp`` varies fastest, so ``rank = dp_rank * tp + tp_rank``.

Both engines number so: vllm reshapes its ranks to (dp, pp, tp) (``initialize_model_parallel``), lmdeploy gives each
data-parallel group ``attn_tp`` ranks in a row (``DistContext``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from align.layout.triple import Layout

Dimension = Literal["tp", "dp", "ep"]
#: In the order in which a ladder adds them.
DIMENSIONS: tuple[Dimension, ...] = ("tp", "dp", "ep")
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RankPlace:
    """Where a global rank stands: its rank in each of its groups, from 0."""

    tp_rank: int
    dp_rank: int
    ep_rank: int


def place_of(layout: Layout, rank: int) -> RankPlace:
    """Where a global rank stands; ``ep_rank`` is 0 without expert parallelism.

    Raises:
        ValueError: the layout has no such rank.
    """
    if not 0 <= rank < layout.world:
        raise ValueError(f"{layout} has no rank {rank}; valid: 0 … {layout.world - 1}")
    return RankPlace(rank % layout.tp, rank // layout.tp, rank if layout.ep > 1 else 0)


def tp_groups(layout: Layout) -> Groups:
    """Ranks that share the attention of one data-parallel group: one group for each ``dp_rank``."""
    return tuple(tuple(range(first, first + layout.tp)) for first in range(0, layout.world, layout.tp))


def dp_groups(layout: Layout) -> Groups:
    """Ranks with the same part of the attention's weights: one group for each ``tp_rank``."""
    return tuple(tuple(range(tp_rank, layout.world, layout.tp)) for tp_rank in range(layout.tp))


def ep_groups(layout: Layout) -> Groups:
    """Ranks that share the experts: the whole world, or each rank by itself without expert parallelism."""
    return (tuple(range(layout.world)),) if layout.ep > 1 else tuple((rank,) for rank in range(layout.world))


def groups(layout: Layout) -> dict[Dimension, Groups]:
    """All groups by dimension. Of each dimension every rank is in exactly one."""
    return {"tp": tp_groups(layout), "dp": dp_groups(layout), "ep": ep_groups(layout)}
