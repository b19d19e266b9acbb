"""Rounding of float64 to a half precision in one step."""

from __future__ import annotations

import torch

Tensor = torch.Tensor
#: Bits of float32 behind the first that the target cuts off.
_CUT = {torch.bfloat16: 0x7FFF, torch.float16: 0x0FFF}


def round_once(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 to nearest, ties to even, in ``dtype``.

    torch converts float64 to bfloat16 and float16 through float32 and so rounds twice. That is wrong where float32
    comes to lie in the middle between two numbers of the target. There float32 is rounded to odd instead: an inexact
    result keeps a trace of what was cut off in its last bit, and the second rounding is right (Boldo and Melquiond,
    2008: two bits more than the target are enough).
    """
    single = exact.float()
    if dtype not in _CUT:
        return exact.to(dtype)
    # Only what ends in zeros can be such a middle; numbers below float16's normal ones lose more bits, also as zeros.
    suspect = (single.view(torch.int32) & _CUT[dtype]) == 0
    if not bool(suspect.any()):
        return single.to(dtype)
    some = exact[suspect]
    near = single[suspect]
    cut = torch.where(near.double().abs() > some.abs(), torch.nextafter(near, torch.zeros_like(near)), near)
    inexact = (cut.double() != some) & some.isfinite()
    bits = cut.view(torch.int32)
    single[suspect] = torch.where(inexact, bits | 1, bits).view(torch.float32)
    return single.to(dtype)
