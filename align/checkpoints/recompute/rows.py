"""Operators that work row by row without a matrix: copies, the embedding, a factor, the sum, RMSNorm."""

from __future__ import annotations

import torch

from align.checkpoints.recompute.exact import Exact, Tensor, of_itself, tiny


def identity(x: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """``x`` itself: a copy has no error."""
    return of_itself(x.to(compute), x.dtype)


def embedding(token_ids: Tensor, weight: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """Rows of ``weight`` ``[vocab, hidden]`` for int64 ids ``[T]``: ``[T, hidden]``, without error."""
    return of_itself(weight.index_select(0, token_ids).to(compute), weight.dtype)


def add(a: Tensor, b: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """``a + b``. One rounding of the sum, whatever cancels: ``|a + b|``."""
    return of_itself(a.to(compute) + b.to(compute), a.dtype)


def scaled(x: Tensor, factor: float, compute: torch.dtype = torch.float32) -> Exact:
    """``factor × x``, with the factor rounded to the dtype of ``x`` first, as transformers scales Gemma's embedding.

    One rounding of the product.
    """
    return of_itself(x.to(compute) * torch.tensor(factor, dtype=x.dtype).to(compute), x.dtype)


def gated_add(a: Tensor, b: Tensor, gate: Tensor, compute: torch.dtype = torch.float32) -> Exact:
    """``a + sigmoid(gate) × b`` with ``a``, ``b`` ``[..., n]`` and ``gate`` ``[..., 1]``.

    The sigmoid and its product with ``b`` round relative to that part, the sum relative to itself.
    """
    part = gate.to(compute).sigmoid() * b.to(compute)
    value = a.to(compute) + part
    return Exact(value, value.abs().add_(part.abs()).add_(tiny(a.dtype)))


def rms_norm(x: Tensor, weight: Tensor, eps: float, compute: torch.dtype = torch.float32, offset: float = 0.0) -> Exact:
    """``x / sqrt(mean(x²) + eps) × weight`` over the last axis, ``x`` ``[..., n]``, ``weight`` broadcastable.

    ``offset`` is added to the weight (1 for Gemma's, which keeps ``weight - 1``); kernels add it in float32.

    All roundings are relative to the result: of the sum of a fused add-norm, which the kernel may normalise before it
    is rounded, of 1/rms, of ``x / rms`` and of the product. No sum of terms with different signs occurs, so
    ``|y|``. A normalised value below ``tiny`` errs by ``u × tiny × |weight|``.
    """
    wide = x.to(compute)
    gamma = weight.to(compute)
    gamma = gamma + offset if offset else gamma
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    value = wide * scale * gamma
    floor = gamma.abs().add(1.0).mul_(tiny(x.dtype))
    return Exact(value, value.abs().add_(floor))
