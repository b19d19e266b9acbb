"""Projections of tensors on random signs: small sums that tell whether two tensors are alike.

The signs come from a counter-based generator indexed by canonical position. So they are the same on every machine, the
digests of the shards of a tensor (each with its own channel indices) and of partial sums add up to the digest of the
whole, and rows are known by (request, position, occurrence), not by their place in a batch.

For signs ``s`` and a difference ``d``, ``E[(s·d)²] = |d|²``: a mean over several projections estimates the square of a
distance without either tensor being at hand. Projections are float32; with C channels they are off by about
``2^-24 × |x|``, so that relative distances below 1e-6 cannot be told from 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = torch.Tensor
#: Projections of each token's channels, and of each channel's tokens.
CHANNEL_PROJECTIONS = 8
TOKEN_PROJECTIONS = 4

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): 64 well mixed bits for each counter."""
    z = counter * _GOLDEN + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _stream(text: str, seed: int) -> NDArray[np.uint64]:
    """A start for the counters of one text, ``[1]``."""
    digest = hashlib.sha256(f"{seed}\0{text}".encode()).digest()
    return np.frombuffer(digest[:8], dtype="<u8").astype(np.uint64)


def _signs(bits: NDArray[np.uint64], count: int) -> Tensor:
    """``count`` signs from each element of ``bits`` ``[n]``: float32 ``[n, count]`` of +1 and -1."""
    chosen = (bits[:, None] >> np.arange(count, dtype=np.uint64)) & np.uint64(1)
    return torch.from_numpy(chosen.astype(np.float32) * 2 - 1)


def channel_signs(kind: str, channels: Tensor, seed: int) -> Tensor:
    """Signs of the channels of a kind of checkpoint.

    Args:
        kind: without the layer, ``attn.q``; all layers share their signs.
        channels: int64 ``[C]`` flat canonical indices; a shard passes those of its own channels.
        seed: of the trace.

    Returns:
        float32 ``[C, 8]``.
    """
    counters = channels.to(torch.int64).numpy().astype(np.uint64)
    return _signs(_mixed(_mixed(counters) ^ _stream(kind, seed)), CHANNEL_PROJECTIONS)


def token_signs(requests: Sequence[str], positions: Sequence[int], occurrences: Sequence[int], seed: int) -> Tensor:
    """Signs of the rows of a step, each known by its request's name, position and occurrence; float32 ``[T, 4]``."""
    if not requests:
        return torch.empty(0, TOKEN_PROJECTIONS)
    streams = {name: _stream(name, seed) for name in set(requests)}
    own = np.concatenate([streams[name] for name in requests])
    counters = np.asarray(positions, dtype=np.int64).astype(np.uint64)
    again = np.asarray(occurrences, dtype=np.int64).astype(np.uint64)
    return _signs(_mixed(_mixed(_mixed(counters) ^ own) + again), TOKEN_PROJECTIONS)


def digest(x: Tensor, channels: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Projections of each token's channels and of each channel's tokens, with their sums of squares.

    One layer is widened at a time: it stays in the processor's cache over all of its products, which is five times
    faster than passing over all layers for each.

    Args:
        x: ``[L, T, C]`` in any float dtype; channels flattened.
        channels: ``[C, 8]`` of :func:`channel_signs`.
        tokens: ``[T, 4]`` of :func:`token_signs`; None leaves the channels out, as empty tensors.

    Returns:
        float32 ``[L, T, 8]``, ``[L, T]``, ``[L, 4, C]`` and ``[L, C]``. The last two of several steps add up.
    """
    layers, rows, width = x.shape
    deep = layers if tokens is not None else 0
    projected, squares = torch.empty(layers, rows, channels.shape[1]), torch.empty(layers, rows)
    crossed, columns = torch.empty(deep, TOKEN_PROJECTIONS, width), torch.empty(deep, width)
    wide = torch.empty(rows, width)
    for layer in range(layers):
        wide.copy_(x[layer])
        torch.mm(wide, channels, out=projected[layer])
        if tokens is not None:
            torch.mm(tokens.T, wide, out=crossed[layer])
        torch.mul(wide, wide, out=wide)
        torch.sum(wide, 1, out=squares[layer])
        if tokens is not None:
            torch.sum(wide, 0, out=columns[layer])
    return projected, squares, crossed, columns


def digest_tokens(x: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """The first two of :func:`digest`, float32 ``[L, T, 8]`` and ``[L, T]``, of ``[L, T, C]`` and signs ``[C, 8]``."""
    return digest(x, signs, None)[:2]


def digest_channels(x: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """The last two of :func:`digest`, float32 ``[L, 4, C]`` and ``[L, C]``, of ``[L, T, C]`` and signs ``[T, 4]``."""
    return digest(x, torch.empty(x.shape[2], 0), signs)[2:]


def estimate_rel_l2(tok_a: Tensor, tok_b: Tensor, tok_sq_b: Tensor) -> Tensor:
    """Estimate ``|a - b| / |b|`` from projections ``[..., P]`` and sums of squares ``[...]``; float32 ``[...]``.

    The square is unbiased. Its relative standard deviation is at most ``sqrt(2 / P)`` (0.5 for 8 projections; less if
    few channels differ, 0 if one does), that of the root about half of it: a fault may look a third smaller or larger
    than it is, and less than a quarter of its size with a probability of about 1e-3. The mean of the squares over T
    tokens is sqrt(T) times sharper. Where b is zero, the result is 0 if a's projections are zero too, else infinite.
    """
    distance = (tok_a.float() - tok_b.float()).square().mean(dim=-1)
    ratio = distance / tok_sq_b.float()
    return torch.where(distance == 0, torch.zeros_like(ratio), ratio).sqrt()
