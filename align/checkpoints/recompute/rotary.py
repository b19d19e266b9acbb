"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute.exact import SINGLE, Exact, Tensor, tiny

#: Rope types whose frequencies are known here; the names are transformers'.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_frequencies(rope: Mapping[str, Any], head_dim: int, seq_len: int | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies and the factor on cos and sin, as transformers computes them (``modeling_rope_utils``).

    Args:
        rope: parameters as in a configuration: ``rope_type`` and ``rope_theta``, and what the type needs (``factor``,
            ``low_freq_factor``, ``high_freq_factor``, ``original_max_position_embeddings``, ``beta_fast``, …). The
            type ``dynamic`` also needs ``max_position_embeddings``; so does ``yarn`` without an original length.
        head_dim: size of a head; ``partial_rotary_factor`` of it is rotated.
        seq_len: longest sequence so far, for ``dynamic``.

    Returns:
        float32 ``[rotated / 2]`` and the factor.

    Raises:
        ValueError: an unknown type, or a parameter is missing.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not recomputed; known: {', '.join(ROPE_TYPES)}")

    def need(key: str) -> float:
        value = rope.get(key)
        if value is None:
            raise ValueError(f"rope type {kind!r} needs {key!r}; the configuration has {', '.join(sorted(rope))}")
        return float(value)

    base = need("rope_theta")
    size = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size
    if kind == "dynamic":
        factor, longest = need("factor"), need("max_position_embeddings")
        reached = max(float(seq_len or 0), longest)
        base *= ((factor * reached / longest) - (factor - 1)) ** (size / (size - 2))
    powers = base**exponents
    inverse = 1.0 / powers
    if kind == "linear":
        return inverse / need("factor"), 1.0
    if kind == "llama3":
        return _llama3(inverse, need), 1.0
    if kind == "yarn":
        return _yarn(rope, powers, base, size, need)
    return inverse, 1.0


def _llama3(inverse: Tensor, need: Callable[[str], float]) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp between."""
    factor, low, high = need("factor"), need("low_freq_factor"), need("high_freq_factor")
    length = need("original_max_position_embeddings")
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > length / low, inverse / factor, inverse)
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(medium, between, scaled)


def _yarn(
    rope: Mapping[str, Any], powers: Tensor, base: float, size: int, need: Callable[[str], float]
) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolated and original frequencies mixed by a ramp over the dimensions."""
    length = float(rope.get("original_max_position_embeddings") or need("max_position_embeddings"))
    factor = float(rope["factor"]) if rope.get("factor") is not None else need("max_position_embeddings") / length

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        one, every = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = mscale(one) / mscale(every) if one and every else mscale(1.0)

    def dimension(rotations: float) -> float:
        return (size * math.log(length / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)


def rope(
    x: Tensor,
    positions: Tensor,
    inverse: Tensor,
    factor: float = 1.0,
    compute: torch.dtype = torch.float32,
    interleaved: bool = False,
) -> Exact:
    """Rotate ``x`` ``[..., R, heads, head_dim]`` by the angles of int64 ``positions`` ``[R]``.

    Channel i makes a pair with channel ``i + rotated / 2`` (neox), or 2 i with 2 i + 1 if ``interleaved`` (GPT-J).

    ``inverse`` ``[rotated / 2]`` and ``factor`` are those of :func:`rope_frequencies`; dimensions beyond ``rotated``
    are handed on. The angles are float32 as in transformers, whatever the compute dtype.

    ``y = x cos + x' sin`` with ``x'`` the other one of the pair. Roundings: cos and sin (both engines keep them in the
    model's dtype), each product, the sum. All are at most ``u (|x cos| + |x' sin|)``, which does not shrink when the
    two cancel. An angle of float32 is off by up to one unit in its last place, ``2^-23 × angle``, if frequencies are
    computed in another order; that moves y by ``(|x| + |x'|)`` times as much.
    """
    angles = (positions.to(torch.float32)[:, None] * inverse[None, :])[:, None, :]  # [R, 1, rotated / 2]
    cos, sin = (angles.to(compute).cos() * factor), (angles.to(compute).sin() * factor)
    half = inverse.shape[0]
    wide = x.to(compute)
    turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]

    def joined(one: Tensor, two: Tensor, rest: Tensor) -> Tensor:
        if interleaved:
            return torch.cat((torch.stack((one, two), dim=-1).flatten(-2), rest), dim=-1)
        return torch.cat((one, two, rest), dim=-1)

    value = joined(first * cos - second * sin, second * cos + first * sin, rest)
    moved = angles.to(compute).abs() * (abs(factor) * 2 * SINGLE / unit_roundoff(x.dtype))
    size_cos, size_sin = cos.abs() + moved, sin.abs() + moved
    one, two = first.abs(), second.abs()
    # The sum of the rounded terms may exceed the exact one by the roundings before it, which `roundings` covers.
    magnitude = joined(one * size_cos + two * size_sin, two * size_cos + one * size_sin, rest.abs())
    return Exact(value, magnitude.add_(tiny(x.dtype)))
