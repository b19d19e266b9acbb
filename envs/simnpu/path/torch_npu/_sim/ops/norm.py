"""RMS norms."""

from __future__ import annotations

import torch

from .. import checks
from ..numerics import is_native
from ..registry import operator

Tensor = torch.Tensor


def _check(name: str, argument: str, x: Tensor, gamma: Tensor, epsilon: float) -> None:
    checks.dtype(name, argument, x, checks.FLOATS)
    checks.rank(name, argument, x, range(1, 9))
    checks.not_empty(name, argument, x)
    if gamma.dtype not in (x.dtype, torch.float32):
        checks.fail(name, "gamma", gamma.dtype, f"{x.dtype}, the dtype of {argument}, or torch.float32")
    axes = gamma.dim()
    if axes < 1 or axes > x.dim() or gamma.shape != x.shape[-axes:]:
        given = checks.shape(gamma)
        checks.fail(name, "gamma", given, f"the last dimensions of {argument}, which has {checks.shape(x)}")
    checks.epsilon(name, epsilon)


def _normalise(x: Tensor, dtype: torch.dtype, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Normalise `x` over the axes of `gamma`; return the result in float32 or, natively, in `dtype`, and
    1/rms.
    """
    axes = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    if is_native():
        return gamma.to(dtype) * (wide * rstd).to(dtype), rstd
    return wide * rstd * gamma.float(), rstd


@operator("npu::npu_rms_norm", source="op-plugin docs, npu_rms_norm")
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return (input / rms(input) * gamma, 1 / rms) over the axes of `gamma`; 1 / rms is float32 with axes of
    1.

    float16, bfloat16 or float32; `gamma` of the same dtype or float32.
    """
    _check("npu::npu_rms_norm", "input", input, gamma, epsilon)
    y, rstd = _normalise(input, input.dtype, gamma, epsilon)
    return y.to(input.dtype), rstd


@operator("_C_ascend::npu_gemma_rms_norm", source="vllm-ascend csrc, npu_gemma_rms_norm")
def npu_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return (x / rms(x) * (1 + gamma), 1 / rms) as `npu_rms_norm` does; the sum with 1 is float32 inside the
    kernel, and rounded to the dtype of `gamma` natively.
    """
    _check("_C_ascend::npu_gemma_rms_norm", "x", x, gamma, epsilon)
    y, rstd = _normalise(x, x.dtype, 1.0 + (gamma if is_native() else gamma.float()), epsilon)
    return y.to(x.dtype), rstd


def _add_normalise(
    name: str, x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(name, "x1", x1, gamma, epsilon)
    checks.same_dtype(name, "gamma", gamma, "x1", x1)
    checks.same_dtype(name, "x2", x2, "x1", x1)
    checks.exact_shape(name, "x2", x2, x1.shape, "the shape of x1")
    total = x1 + x2 if is_native() else x1.float() + x2.float()
    y, rstd = _normalise(total, x1.dtype, gamma, epsilon)
    if beta is not None:
        checks.same_dtype(name, "beta", beta, "gamma", gamma)
        checks.exact_shape(name, "beta", beta, gamma.shape, "the shape of gamma")
        y = y + beta
    return y.to(x1.dtype), rstd, total.to(x1.dtype)


@operator("npu::npu_add_rms_norm", source="op-plugin docs, npu_add_rms_norm")
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rms norm of x1 + x2, 1 / rms, x1 + x2), in the dtype of `x1`; 1 / rms is float32."""
    return _add_normalise("npu::npu_add_rms_norm", x1, x2, gamma, None, epsilon)


@operator("_C_ascend::npu_add_rms_norm_bias", source="vllm-ascend csrc, npu_add_rms_norm_bias")
def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `npu_add_rms_norm` returns, with `beta` added to the normalised output."""
    return _add_normalise("_C_ascend::npu_add_rms_norm_bias", x1, x2, gamma, beta, epsilon)
