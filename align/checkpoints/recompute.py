"""Operators recomputed from their recorded inputs, and how far a right kernel may be from the result.

Every function takes inputs in the model's dtype (``bfloat16`` or ``float16``), computes in ``compute`` (``float32`` in
the worker, ``float64`` on the driver) and returns :class:`Exact`: the result, and a ``magnitude`` such that the error
of an element of a right kernel is at most ``roundings × u × magnitude``, see :mod:`align.checkpoints.bounds`. The
magnitude is never smaller than the result. A constant ``tiny``, the smallest normal number, is added to it, because
numbers below it are rounded to a grid of ``u × tiny``.

Leading axes (layers) are free: all functions broadcast over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from align.checkpoints.bounds import unit_roundoff

Tensor = torch.Tensor
#: Unit roundoff of the float32 arithmetic inside kernels.
_SINGLE = 2.0**-24
#: Rope types whose frequencies are known here; the names are transformers'.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class Exact(NamedTuple):
    """A recomputed result and its magnitude, both in the compute dtype and of the same shape."""

    value: Tensor
    magnitude: Tensor


def tiny(dtype: torch.dtype) -> float:
    """The smallest normal number of a dtype; below it the spacing no longer shrinks."""
    return float(torch.finfo(dtype).tiny)


def _of(value: Tensor, dtype: torch.dtype) -> Exact:
    """A result whose errors are relative to itself."""
    return Exact(value, value.abs().add_(tiny(dtype)))


def identity(x: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """``x`` itself: a copy has no error."""
    return _of(x.to(compute), x.dtype)


def embedding(token_ids: Tensor, weight: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """Rows of ``weight`` ``[vocab, hidden]`` for int64 ids ``[T]``: ``[T, hidden]``, without error."""
    return _of(weight.index_select(0, token_ids).to(compute), weight.dtype)


def add(a: Tensor, b: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """``a + b``. One rounding of the sum, whatever cancels: ``|a + b|``."""
    return _of(a.to(compute) + b.to(compute), a.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, compute: torch.dtype = torch.float32) -> Exact:
    """``x / sqrt(mean(x²) + eps) × weight`` over the last axis, ``x`` ``[..., n]``, ``weight`` broadcastable.

    All roundings are relative to the result: of the sum of a fused add-norm, which the kernel may normalise before it
    is rounded, of 1/rms, of ``x / rms`` and of the product. No sum of terms with different signs occurs, so
    ``|y|``. A normalised value below ``tiny`` errs by ``u × tiny × |weight|``.
    """
    wide = x.to(compute)
    gamma = weight.to(compute)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    value = wide * scale * gamma
    floor = gamma.abs().add(1.0).mul_(tiny(x.dtype))
    return Exact(value, value.abs().add_(floor))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> Exact:
    """``x @ weight.T + bias``: ``x`` ``[..., R, in]``, ``weight`` ``[..., out, in]``, ``bias`` ``[..., out]``.

    See :func:`linear_magnitude`.
    """
    wide, matrix = x.to(compute), weight.to(compute)
    product = wide @ matrix.transpose(-1, -2)
    norms = torch.linalg.vector_norm(matrix, dim=-1)
    magnitude = linear_magnitude(product, torch.linalg.vector_norm(wide, dim=-1), norms, x.shape[-1], x.dtype)
    if bias is None:
        return Exact(product, magnitude)
    value = product + bias.to(compute).unsqueeze(-2)
    return Exact(value, magnitude.add_(value.abs()))


def linear_magnitude(product: Tensor, x_norm: Tensor, weight_norm: Tensor, inner: int, dtype: torch.dtype) -> Tensor:
    """The magnitude of a product ``[..., R, out]`` without bias.

    Products of half-precision numbers are exact in float32. What may happen to their sum ``y``:

    * the sum is rounded at the end: ``u |y|``;
    * float32 accumulation. A sum of K terms in sequence has an error of deviation ``0.3 K × 2^-24`` times the size of
      the terms' root mean square, which is at most ``0.3 sqrt(K) × 2^-24 × |x| |w|`` (2-norms); six deviations are
      ``2 sqrt(K) × 2^-24 × |x| |w|``. It counts where terms cancel;
    * a kernel that splits the sum may round the parts. Each part is as large as a typical output, even where the
      outputs cancel. The typical size is taken from the row itself: the mean of ``|y|`` over the outputs, scaled by
      the norm of the output's weight row relative to the others.

    Args:
        product: ``[..., R, out]``.
        x_norm: ``[..., R]`` 2-norms of the rows.
        weight_norm: ``[..., out]`` 2-norms of the weight's rows.
        inner: length K of the sums.
        dtype: the model's.
    """
    magnitude = product.abs()
    typical = magnitude.mean(-1)
    mean_norm = weight_norm.mean(-1, keepdim=True).clamp_min(torch.finfo(product.dtype).tiny)
    accumulation = 2 * math.sqrt(inner) * _SINGLE / unit_roundoff(dtype)
    rows = typical / mean_norm + accumulation * x_norm
    magnitude.addcmul_(rows.unsqueeze(-1), weight_norm.unsqueeze(-2))
    return magnitude.add_(tiny(dtype))


def silu_mul(gate: Tensor, up: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """``gate × sigmoid(gate) × up``. Products alone, so every rounding is relative: ``|y|``.

    But for strongly negative gates: there the sigmoid falls below ``tiny`` of the dtype, or ``exp(-gate)`` overflows
    float32 (below -88). What is lost is at most ``32 × tiny × |up|`` in units of ``u``, because the sigmoid falls
    faster than the gate grows.
    """
    wide, other = gate.to(compute), up.to(compute)
    value = torch.nn.functional.silu(wide) * other
    lost = 32 * max(tiny(gate.dtype), tiny(torch.float32) / unit_roundoff(gate.dtype))
    return Exact(value, value.abs().add_(other.abs(), alpha=lost).add_(tiny(gate.dtype)))


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
) -> Exact:
    """Rotate ``x`` ``[..., R, heads, head_dim]`` by the angles of int64 ``positions`` ``[R]``, halves as pairs (neox).

    ``inverse`` ``[rotated / 2]`` and ``factor`` are those of :func:`rope_frequencies`; dimensions beyond ``rotated``
    are handed on. The angles are float32 as in transformers, whatever the compute dtype.

    ``y = x cos + x' sin`` with ``x'`` the other half. Roundings: cos and sin (both engines keep them in the model's
    dtype), each product, the sum. All are at most ``u (|x cos| + |x' sin|)``, which does not shrink when the two
    cancel. An angle of float32 is off by up to one unit in its last place, ``2^-23 × angle``, if frequencies are
    computed in another order; that moves y by ``(|x| + |x'|)`` times as much.
    """
    angles = (positions.to(torch.float32)[:, None] * inverse[None, :])[:, None, :]  # [R, 1, rotated / 2]
    cos, sin = (angles.to(compute).cos() * factor), (angles.to(compute).sin() * factor)
    half = inverse.shape[0]
    wide = x.to(compute)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    value = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    moved = angles.to(compute).abs() * (abs(factor) * 2 * _SINGLE / unit_roundoff(x.dtype))
    size_cos, size_sin = cos.abs() + moved, sin.abs() + moved
    one, two = first.abs(), second.abs()
    # The sum of the rounded terms may exceed the exact one by the roundings before it, which `roundings` covers.
    magnitude = torch.cat((one * size_cos + two * size_sin, two * size_cos + one * size_sin, rest.abs()), dim=-1)
    return Exact(value, magnitude.add_(tiny(x.dtype)))


def attention(
    query: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    compute: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
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
    moved = scores.square()
    if 3 * unit * float(scores.abs().amax()) > 0.25:
        moved = ((scores.abs() * (3 * unit)).clamp_(max=20.0).expm1_() / (3 * unit)).square_()
    if math.frexp(scale)[0] != 0.5:  # the scaling rounds once more
        moved.mul_(2.0)
    moved.add_(spread.clamp_min_(1.0))
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
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
