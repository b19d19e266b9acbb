"""Attention of the rows of one request over its keys."""

from __future__ import annotations

import math

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute.exact import Exact, Tensor, tiny


def attention(
    query: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    compute: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Exact:
    """Causal attention of the rows of one request over all its keys so far.

    Args:
        query: ``[..., R, heads, head_dim]``.
        positions: int64 ``[R]``, of the query rows.
        keys: ``[..., S, kv_heads, head_dim]``; key j stands at position j. May already be in ``compute``.
        values: ``[..., S, kv_heads, head_dim]`` likewise.
        scale: of the scores.
        window: a query at position i sees keys ``i - window < j <= i``; ``None``: all up to i.
        compute: dtype to compute in.
        dtype: the model's; that of ``query`` if not given.
        softcap: scores become ``softcap × tanh(score / softcap)`` (Gemma 2).
        sinks: ``[heads]``: a score of each head that takes its share of the probability and has no value (GPT-OSS).

    Returns:
        ``[..., R, heads, head_dim]``.

    ``y = sum p_j v_j`` with ``p = softmax(s)``. Eager code rounds the scores (the product and, unless the scale is a
    power of two, the scaled product), the probabilities, and the output:

    * ``s_j`` moves by ``u |s_j|``, hence y by ``p_j u |s_j| (v_j - y)``. A kernel that scales the query first rounds
      each of its elements: with terms of random sign that moves the score by ``u a``, where
      ``a² = |q|² mean|k|² scale² / head_dim``. a is taken to be at least 1, which covers float32 sums.
    * ``p_j`` moves by ``u p_j``, hence y by ``u p_j v_j``.
    * y is rounded: ``u |y|``.

    Keys are rounded independently of each other, so squares add: ``u sqrt(sum p² (s² + a²) (v - y)² + sum p² v²)``.
    That is far below the worst case, ``sum p |s| |v - y|``, and lets a missing key be seen. Probabilities that are
    alike are rounded alike; then the error is common to all terms and at most ``u |y|``. Hence the magnitude
    ``|y| + sqrt(...)``. Where scores are so large that their rounding is no small change (``u |s|`` of the order of
    1), the change is ``exp(3 u |s|) - 1`` instead of ``3 u |s|``.

    A soft cap is a function of the score with the slope ``d = 1 - tanh²``: the score's own roundings and that of the
    quotient shrink by d, those of tanh and of the last product are relative to the capped score. A sink is one more key
    whose value is 0.
    """
    dtype = query.dtype if dtype is None else dtype
    unit, floor = unit_roundoff(dtype), tiny(dtype)
    *lead, rows, heads, size = query.shape
    span, kv_heads = keys.shape[-3], keys.shape[-2]
    groups = heads // kv_heads
    wide = query.to(compute).reshape(*lead, rows, kv_heads, groups, size).movedim(-4, -2)  # [..., KV, G, R, D]
    wide = wide.reshape(*lead, kv_heads, groups * rows, size)
    key = keys.to(compute).transpose(-2, -3)  # [..., KV, S, D]
    value = values.to(compute).transpose(-2, -3)
    scores = (wide @ key.transpose(-1, -2)).mul_(scale)  # [..., KV, G * R, S]
    spread = wide.square().sum(-1, keepdim=True) * (key.square().sum(-1).mean(-1)[..., None, None] * (scale**2 / size))
    hidden = _hidden(positions, span, window)
    hidden = None if hidden is None else hidden.repeat(groups, 1)
    scaling_rounds = math.frexp(scale)[0] != 0.5
    if softcap is not None:
        scores, moved = _capped(scores, spread, softcap, scaling_rounds)
        spread.zero_()
    else:
        moved = scores.square()
    if 3 * unit * float(scores.abs().amax()) > 0.25:
        change = (scores.abs() if softcap is None else moved.sqrt_()) * (3 * unit)
        moved = (change.clamp_(max=20.0).expm1_() / (3 * unit)).square_()
    if scaling_rounds and softcap is None:  # the scaling rounds once more
        moved.mul_(2.0)
    moved.add_(spread.clamp_min_(1.0))
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.to(compute).reshape(kv_heads, groups, 1, 1).expand(kv_heads, groups, rows, 1)
        column = column.reshape(kv_heads, groups * rows, 1).expand(*scores.shape[:-1], 1)
        scores, moved = torch.cat((scores, column), -1), torch.cat((moved, column.square() + 1.0), -1)
        value = torch.cat((value, torch.zeros_like(value[..., :1, :])), -2)
    weights = torch.softmax(scores, dim=-1)
    result = weights @ value
    squares = weights.square_()
    moved.mul_(squares)  # p² (s² + a²)
    value_squared = value.square()
    total = squares.add_(moved).add_(floor**2) @ value_squared  # p² (s² + a² + 1) v²
    total.sub_((moved @ value).mul_(result), alpha=2.0).add_(moved.sum(-1, keepdim=True) * result.square())
    magnitude = total.clamp_min_(0.0).sqrt_().add_(result.abs()).add_(floor)

    def back(one: Tensor) -> Tensor:
        return one.reshape(*lead, kv_heads, groups, rows, size).movedim(-2, -4).reshape(*lead, rows, heads, size)

    return Exact(back(result), back(magnitude))


def _hidden(positions: Tensor, span: int, window: int | None) -> Tensor | None:
    """Which keys ``[R, S]`` the rows must not see; ``None`` if they see all."""
    later = int(positions.min()) < span - 1
    earlier = window is not None and int(positions.max()) >= window
    if not (later or earlier):
        return None
    behind = positions[:, None] - torch.arange(span)[None, :]
    hidden = behind < 0
    return hidden if window is None else hidden | (behind >= window)


def _capped(scores: Tensor, spread: Tensor, cap: float, scaling_rounds: bool) -> tuple[Tensor, Tensor]:
    """Capped scores, and the squares of how far rounding moves them in units of u."""
    curve = (scores / cap).tanh_()
    slope = 1 - curve.square()
    capped = curve.mul_(cap)
    before = 3.0 if scaling_rounds else 2.0  # product, scaling, quotient
    moved = (scores.square().mul_(before).add_(spread)).mul_(slope.square_())
    return capped, moved.add_(capped.square(), alpha=2.0)
