"""Matrix products."""

from __future__ import annotations

import math

import torch

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute.exact import SINGLE, Exact, Tensor, tiny


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
    accumulation = 2 * math.sqrt(inner) * SINGLE / unit_roundoff(dtype)
    rows = typical / mean_norm + accumulation * x_norm
    magnitude.addcmul_(rows.unsqueeze(-1), weight_norm.unsqueeze(-2))
    return magnitude.add_(tiny(dtype))


def soft_cap(exact: Exact, cap: float) -> Exact:
    """``cap × tanh(y / cap)`` of a product ``y`` (Gemma's logits).

    Two roundings of the product's magnitude and one of the quotient shrink by the slope ``1 - tanh²``; tanh and the
    last product round once each. Halved, because the bound of a product counts two roundings.
    """
    curve = (exact.value / cap).tanh()
    value = curve * cap
    slope = 1 - curve.square()
    return Exact(value, slope * (exact.magnitude + exact.value.abs() / 2) + value.abs())
