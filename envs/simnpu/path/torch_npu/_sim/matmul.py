"""Matrix products of half-precision tensors as a matrix unit computes them.

Products are exact, sums are float32, and the result is rounded once. A CPU's own kernels for bfloat16 and float16 do
the same and take up to eight times as long for many rows. With ``native`` numerics the CPU's kernels are kept: then
results are those of transformers, bit by bit.

Operands and products in float32 lie in buffers that are kept: glibc does not reuse the aligned blocks that torch frees,
so that a fresh copy of each weight would let the heap grow by gigabytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torch_npu._sim import numerics

#: Fewer rows than this are faster in the tensor's own dtype, because the weights are not converted.
MIN_ROWS = 4
_HALF = (torch.bfloat16, torch.float16)


class _Buffers(threading.local):
    """Flat float32 memory by purpose, as large as the largest so far."""

    def __init__(self) -> None:
        self.flat: dict[str, torch.Tensor] = {}


_buffers = _Buffers()


def _buffer(count: int, purpose: str) -> torch.Tensor:
    flat = _buffers.flat.get(purpose)
    if flat is None or flat.numel() < count:
        flat = _buffers.flat[purpose] = torch.empty(count, dtype=torch.float32)
    return flat[:count]


def _widened(tensor: torch.Tensor, operand: str) -> torch.Tensor:
    """``tensor`` in float32, valid until the same operand is widened again; dense tensors keep their strides."""
    transposed = tensor.dim() == 2 and tensor.t().is_contiguous()
    shape = tensor.shape[::-1] if transposed else tensor.shape
    wide = _buffer(tensor.numel(), operand).view(shape)
    if transposed:
        wide = wide.t()
    return wide.copy_(tensor)


def _suits(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> bool:
    if numerics.is_native() or left.dtype not in _HALF or left.dtype != right.dtype or left.dim() != 2:
        return False
    # The operator's own kernel refuses what does not fit, and resizes an output of another shape.
    return right.dim() == 2 and left.shape[0] >= MIN_ROWS and out.shape == (left.shape[0], right.shape[1])


def mm_out(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """``left @ right``: ``[rows, inner] @ [inner, columns]`` into ``out`` ``[rows, columns]``."""
    if not _suits(left, right, out):
        torch.ops.aten.mm.out(left, right, out=out)
        return out
    product = _buffer(out.numel(), "product").view(out.shape)
    return out.copy_(torch.mm(_widened(left, "left"), _widened(right, "right"), out=product))


def addmm_out(
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    """``beta * bias + alpha * left @ right`` into ``out`` ``[rows, columns]``; ``bias`` broadcasts."""
    if bias.dtype != left.dtype or not _suits(left, right, out):
        torch.ops.aten.addmm.out(bias, left, right, beta=beta, alpha=alpha, out=out)
        return out
    product = _buffer(out.numel(), "product").view(out.shape)
    wide = _widened(left, "left"), _widened(right, "right")
    return out.copy_(torch.addmm(bias.float(), *wide, beta=beta, alpha=alpha, out=product))


#: What the device's fallback calls in place of the CPU's operator.
KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.mm.out: mm_out,
    torch.ops.aten.addmm.out: addmm_out,
}
