"""Matrix products and storage formats."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from .. import checks
from ..numerics import internal
from ..registry import operator

Tensor = torch.Tensor

FORMAT_ND = 2
_FORMATS = (0, 2, 3, 4, 12, 16, 27, 29, 30, 32, 33, 35, 47)


@operator("npu::npu_linear", source="op-plugin docs, npu_linear")
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return input @ weight.T + bias; input [M, K], weight [N, K], bias [N], all of one float dtype."""
    name = "npu::npu_linear"
    checks.dtype(name, "input", input, checks.FLOATS)
    checks.rank(name, "input", input, (2,))
    checks.same_dtype(name, "weight", weight, "input", input)
    checks.rank(name, "weight", weight, (2,))
    if weight.shape[1] != input.shape[1]:
        checks.fail(name, "weight", checks.shape(weight), f"{input.shape[1]} columns, as many as input has")
    if bias is not None:
        checks.same_dtype(name, "bias", bias, "input", input)
        checks.exact_shape(name, "bias", bias, (weight.shape[0],), "one number for each row of weight")
    wide = None if bias is None else internal(bias)
    return linear(internal(input), internal(weight), wide).to(input.dtype)


@operator(
    "atb::_npu_matmul_add_fp32",
    source="op-plugin op_plugin/ops/atb/LinearAtb.cpp (transposeA, enAccum)",
    faulted_input="x",
)
def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:
    """Add x.T @ weight to `C` in place; x [K, M], weight [K, N] of one half dtype, C float32 [M, N]."""
    name = "atb::_npu_matmul_add_fp32"
    checks.dtype(name, "x", x, checks.HALVES)
    checks.rank(name, "x", x, (2,))
    checks.same_dtype(name, "weight", weight, "x", x)
    checks.rank(name, "weight", weight, (2,))
    checks.dtype(name, "C", C, (torch.float32,))
    if weight.shape[0] != x.shape[0]:
        checks.fail(name, "weight", checks.shape(weight), f"{x.shape[0]} rows, as many as x has")
    checks.exact_shape(name, "C", C, (x.shape[1], weight.shape[1]), "the columns of x by those of weight")
    # Products of half numbers accumulate in float32 on hardware, whatever the numerics of other operators.
    C.add_(x.float().t() @ weight.float())


def _check_format(name: str, acl_format: int, customize_dtype: int | None, input_dtype: int | None) -> None:
    checks.choice(name, "acl_format", int(acl_format), _FORMATS)
    if customize_dtype is not None or input_dtype is not None:
        checks.unsimulated(name, "a change of dtype (customize_dtype, input_dtype)")


@operator("npu::npu_format_cast", source="op-plugin docs, npu_format_cast")
def npu_format_cast(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return `input` itself: the simulated device keeps every tensor in the plain ND format."""
    _check_format("npu::npu_format_cast", acl_format, customize_dtype, input_dtype)
    return input


@operator("npu::npu_format_cast_.acl_format", source="op-plugin docs, npu_format_cast_")
def npu_format_cast_(
    input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """Return `input` itself; see `npu_format_cast`."""
    _check_format("npu::npu_format_cast_.acl_format", acl_format, customize_dtype, input_dtype)
    return input


@operator("npu::get_npu_format", source="torch_npu.get_npu_format")
def get_npu_format(input: Tensor) -> int:
    """Return 2 (ND), the only format on the simulated device."""
    return FORMAT_ND
