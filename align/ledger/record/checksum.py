"""A 64-bit checksum of each token's key or value row, of bits and not of numbers.

The row is read as 32-bit words ``a_j`` (16-bit halves are paired, so a row of odd length is padded by a zero); the sum
is ``Σ_j a_j · w_j mod 2^64`` with fixed pseudo-random 64-bit weights ``w_j``. So

* NaN equals itself bit for bit, and +0 differs from −0;
* strides, block sizes and the place of a row in the cache do not matter, only the order of heads and channels within
  the row;
* a row of zeros has the sum 0, which is what a zeroed cache holds.

Collisions: two different rows agree iff ``Σ d_j · w_j = 0 mod 2^64`` with ``|d_j| < 2^32``. If 2^t is the largest power
of two that divides every ``d_j`` this has probability ``2^-(64 - t)`` over the choice of weights, t ≤ 31: at most
``2^-33`` in the worst case (rows that differ in nothing but one sign), and practically ``2^-64`` for rows of other
tokens. Among 10^6 comparisons of unlike rows the worst case misses one with probability 10^-4. The weights are fixed,
so it is no defence against somebody who wants a collision.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_SEED = 0x616C69676E
#: Rows that are widened to 64 bits at once: the copy stays in the processor's cache.
_CHUNK = 1024


@cache
def _weights(words: int) -> Tensor:
    """int64 ``[words]``, odd: a row that differs in one word never agrees."""
    generator = torch.Generator().manual_seed(_SEED)
    high, low = (torch.randint(0, 1 << 32, (words,), generator=generator, dtype=torch.int64) for _ in range(2))
    return (high << 32) | low | 1


def row_sums(rows: Tensor) -> Tensor:
    """The checksum of each row.

    Args:
        rows: ``[T, heads, dim]`` or ``[T, …]``, any dtype of 1, 2, 4 or 8 bytes, any strides; read on the CPU.

    Returns:
        int64 ``[T]``.
    """
    count = rows.shape[0]
    if rows.numel() == 0:
        return torch.zeros(count, dtype=torch.int64)
    octets = rows.detach().to("cpu").reshape(count, -1).contiguous().view(torch.uint8)
    short = -octets.shape[1] % 4
    if short:
        octets = torch.nn.functional.pad(octets, (0, short))
    words = octets.view(torch.int32)
    weights = _weights(words.shape[1])
    return torch.cat([(part.long().mul_(weights)).sum(-1) for part in words.split(_CHUNK)])


def cache_sums(cache: Tensor, slots: Tensor) -> Tensor:
    """The checksums of rows of a paged cache.

    Args:
        cache: ``[blocks, block_size, heads, dim]`` or ``[blocks, block_size, …]`` of one layer, contiguous.
        slots: int64 ``[n]``, within the cache.

    Returns:
        int64 ``[n]``. An index outside raises what torch raises.
    """
    # index_select: several times as fast as cache[blocks, offsets].
    rows = cache.detach().view(cache.shape[0] * cache.shape[1], -1)
    return row_sums(rows.index_select(0, slots.to(rows.device)))
