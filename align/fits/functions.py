"""Activation functions by the names of configurations, and the product that follows them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from align.checkpoints.bounds import unit_roundoff
from align.checkpoints.recompute import Exact, tiny

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


#: What may stand between gate and product; several names for one function occur in configurations.
FUNCTIONS: dict[str, Function] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "quick_gelu": _quick,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


def gated(activated: Tensor, other: Tensor, dtype: torch.dtype) -> Exact:
    """``activated × other`` in float64; every rounding is relative to the product.

    But for what falls below the smallest normal number on the way, as in
    :func:`align.checkpoints.recompute.silu_mul`, and for a GELU's float32 cancellation of ``1 + erf``.
    """
    value = activated * other.to(torch.float64)
    lost = 32 * max(tiny(dtype), tiny(torch.float32) / unit_roundoff(dtype))
    return Exact(value, value.abs() + other.to(torch.float64).abs() * lost + tiny(dtype))
