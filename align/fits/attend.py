"""Attention of one request in float64, with every argument that a call may get wrong."""

from __future__ import annotations

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import Exact, tiny

Tensor = torch.Tensor
WIDE = torch.float64
#: Scores held at a time.
_CHUNK = 1 << 22


def attend(
    query: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    softcap: float | None = None,
    ahead: int = 0,
    first: int = 0,
    causal: bool = True,
    heads: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Exact:
    """Rows ``[T, heads, head_dim]`` of ``query`` over keys and values ``[S, kv_heads, head_dim]``.

    Args:
        query, keys, values: as recorded.
        positions: int64 ``[T]``, of the query rows; key j stands at position j.
        scale: of the scores.
        dtype: the model's, for the magnitude.
        window: a query at position i sees keys ``i - window < j``; ``None``: all.
        softcap: scores become ``softcap × tanh(score / softcap)``.
        ahead: a query at position i sees keys up to ``i + ahead``.
        first: keys before this position are not seen.
        causal: false: every query sees all keys.
        heads: int64 ``[heads]``, the key head of each query head; groups of neighbours if not given.
        sinks: ``[heads]``: one more score of each head that takes its share and has no value.

    Returns:
        ``[T, heads, head_dim]``; NaN in rows that see no key. The magnitude is that of
        :func:`align.checkpoints.recompute.attention`: ``|y| + sqrt(sum p² (s² + a²) (v - y)² + sum p² v²)``.
    """
    T, H, D = query.shape
    S, kv, _ = keys.shape
    mapping = torch.arange(H) // (H // kv) if heads is None else heads
    value, magnitude = torch.empty(T, H, D, dtype=WIDE), torch.empty(T, H, D, dtype=WIDE)
    behind = positions[:, None] - torch.arange(S)[None, :]
    hidden = torch.zeros(T, S, dtype=torch.bool)
    if causal:
        hidden |= behind < -ahead
    if window is not None:
        hidden |= behind >= window
    hidden |= torch.arange(S)[None, :] < first
    step = max(1, _CHUNK // (S * H))
    wide_keys, wide_values = keys.to(WIDE).permute(1, 2, 0), values.to(WIDE).transpose(0, 1)
    for start in range(0, T, step):
        rows = slice(start, start + step)
        part = query[rows].to(WIDE).transpose(0, 1)
        for head in mapping.unique().tolist():
            chosen = torch.nonzero(mapping == head).flatten()
            own = None if sinks is None else sinks.to(WIDE)[chosen, None, None]
            y, size = _one(part[chosen], wide_keys[head], wide_values[head], hidden[rows], scale, softcap, own, dtype)
            value[rows, chosen] = y.transpose(0, 1)
            magnitude[rows, chosen] = size.transpose(0, 1)
    return Exact(value, magnitude)


def _one(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Query heads ``[G, R, D]`` of one key head: keys ``[D, S]``, values ``[S, D]``, ``hidden`` ``[R, S]``."""
    unit, size = unit_roundoff(dtype), query.shape[-1]
    scores = query @ keys * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    spread = query.square().sum(-1, keepdim=True) * (keys.square().sum(0).mean() * scale**2 / size)
    moved = ((scores.abs() * (3 * unit)).clamp_max(20.0).expm1() / (3 * unit)).square() * 2 + spread.clamp_min(1.0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(-1, scores.shape[1], 1)), -1)
    weights = torch.softmax(scores, dim=-1)[..., : values.shape[0]]
    y = weights @ values
    squares = weights.square()
    moved = moved * squares
    total = (moved + squares) @ values.square() - 2 * (moved @ values) * y + moved.sum(-1, keepdim=True) * y.square()
    return y, total.clamp_min(0.0).sqrt() + y.abs() + tiny(dtype)
