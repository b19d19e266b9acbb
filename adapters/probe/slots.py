"""Cache slots in canonical form: allocators and block sizes differ, so raw slots of two engines never compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def positions_of(slots: Tensor, tables: Tensor, counts: Sequence[int], block_size: int) -> Tensor:
    """The position in its request that each slot stands for.

    Args:
        slots: flat cache slots ``[layers, T]``, any integer dtype.
        tables: ids of each request's blocks, in order, ``[requests, blocks]``; rows in batch order. Or a row per token,
            ``[T, blocks]``.
        counts: tokens of each request in this step; they make T.
        block_size: tokens in one block.

    Returns:
        int64 ``[layers, T]``; −1 for a slot in a block that is not in its request's table.

    Raises:
        ValueError: fewer table rows than requests.
    """
    if tables.dim() != 2 or tables.shape[0] < len(counts):
        raise ValueError(f"a block table of shape {list(tables.shape)} for {len(counts)} requests")
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    table = tables.long()
    if not _per_token(tables, counts):
        table = table[owner]  # [T, blocks]
    slots = slots.long()
    block = slots.div(block_size, rounding_mode="floor")
    match = block[:, :, None] == table[None]
    # The first match: unused entries behind a request's blocks repeat a valid id (0) in both engines.
    place = match.int().argmax(-1)
    found = place * block_size + slots.remainder(block_size)
    return torch.where(match.any(-1) & (slots >= 0), found, torch.full_like(found, -1))


def _per_token(tables: Tensor, counts: Sequence[int]) -> bool:
    """Whether the rows were repeated once per token, as lmdeploy does for a prefill over the paged cache."""
    if tables.shape[0] != sum(counts):
        return False
    return all(bool((rows == rows[:1]).all()) for rows in tables.split(list(counts)))
