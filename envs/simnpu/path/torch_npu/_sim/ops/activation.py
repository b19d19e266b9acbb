"""Activations."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from .. import checks
from ..numerics import internal
from ..registry import operator

Tensor = torch.Tensor


@operator("npu::npu_swiglu", source="op-plugin docs, npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Return silu(a) * b for the halves a, b of `input` along `dim`; float16, bfloat16 or float32."""
    name = "npu::npu_swiglu"
    checks.dtype(name, "input", input, checks.FLOATS)
    checks.rank(name, "input", input, range(1, 9))
    checks.not_empty(name, "input", input)
    if not -input.dim() <= dim < input.dim():
        checks.fail(name, "dim", dim, f"{-input.dim()} to {input.dim() - 1}")
    if input.shape[dim] % 2:
        checks.fail(name, "input", f"{checks.shape(input)} with dim={dim}", "an even size along dim")
    gate, up = internal(input).chunk(2, dim)
    return (silu(gate) * up).to(input.dtype)


@operator("npu::npu_silu", source="op-plugin docs, npu_silu")
def npu_silu(input: Tensor) -> Tensor:
    """Return input * sigmoid(input); float16, bfloat16 or float32."""
    checks.dtype("npu::npu_silu", "input", input, checks.FLOATS)
    return silu(internal(input)).to(input.dtype)
