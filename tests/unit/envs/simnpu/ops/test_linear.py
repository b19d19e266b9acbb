from __future__ import annotations

from typing import Any

import pytest
import torch
from simnpu_ops_reference import FLOATS, HALVES, assert_close, normal, refusal
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import linear

Tensor = torch.Tensor


def product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """left @ right in float64, element by element, and the same of the absolute values."""
    left, right = left.double(), right.double()
    exact = torch.empty(left.shape[0], right.shape[1], dtype=torch.float64)
    size = torch.empty_like(exact)
    for row in range(left.shape[0]):
        for column in range(right.shape[1]):
            terms = left[row] * right[:, column]
            exact[row, column], size[row, column] = terms.sum(), terms.abs().sum()
    return exact, size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype, biased: bool) -> None:
    x, weight = normal(5, 48, dtype=dtype), normal(7, 48, dtype=dtype, seed=1)
    bias = normal(7, dtype=dtype, seed=2) if biased else None
    exact, size = product(x, weight.t())
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    y = linear.npu_linear(x, weight, bias)
    assert y.dtype == dtype
    if numerics == "native":
        assert_close(y, exact, size, 2, 50)
    else:
        assert_close(y, exact, exact, 1, 50, size)


@pytest.mark.parametrize("dtype", HALVES)
def test_matmul_add_accumulates_in_float32(numerics: str, dtype: torch.dtype) -> None:
    x, weight, total = normal(6, 4, dtype=dtype), normal(6, 5, dtype=dtype, seed=1), normal(4, 5, seed=2)
    before = total.double()
    exact, size = product(x.t(), weight)
    linear._npu_matmul_add_fp32(x, weight, total)
    assert_close(total, before + exact, before.abs() + size, 1, 8)


def test_a_format_cast_keeps_the_tensor() -> None:
    x = normal(4, 32)
    assert linear.npu_format_cast(x, 29) is x
    assert linear.npu_format_cast_(x, 2) is x
    assert linear.get_npu_format(x) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(3, 7)}, "weight is shape (3, 7)"),
        ({"input": torch.zeros(1, 2, 8)}, "input is shape (1, 2, 8)"),
        ({"bias": torch.zeros(2)}, "bias is shape (2,)"),
        ({"weight": torch.zeros(3, 8).half()}, "weight is torch.float16"),
        ({"input": torch.zeros(2, 8, dtype=torch.int8)}, "input is torch.int8"),
    ],
)
def test_linear_refuses(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"input": torch.zeros(2, 8), "weight": torch.zeros(3, 8), "bias": torch.zeros(3)}
    refusal("npu::npu_linear", linear.npu_linear, given | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 4)}, "x is torch.float32"),
        ({"weight": torch.zeros(3, 4).half()}, "weight is shape (3, 4)"),
        ({"C": torch.zeros(4, 4).half()}, "C is torch.float16"),
        ({"C": torch.zeros(2, 4)}, "C is shape (2, 4)"),
        ({"weight": torch.zeros(2, 4).bfloat16()}, "weight is torch.bfloat16"),
    ],
)
def test_matmul_add_refuses(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(2, 4).half(),
        "weight": torch.zeros(2, 4).half(),
        "C": torch.zeros(4, 4),
    }
    refusal("atb::_npu_matmul_add_fp32", linear._npu_matmul_add_fp32, given | change, words)


@pytest.mark.parametrize("acl_format", [-1, 1, 99])
def test_format_casts_refuse_unknown_formats(acl_format: int) -> None:
    given: dict[str, Any] = {"input": torch.zeros(2), "acl_format": acl_format}
    refusal("npu::npu_format_cast", linear.npu_format_cast, given, f"acl_format is {acl_format}")
    refusal("npu::npu_format_cast_.acl_format", linear.npu_format_cast_, given, f"acl_format is {acl_format}")


def test_a_format_cast_with_another_dtype_is_left_out() -> None:
    with pytest.raises(UnsimulatedOperator, match="npu::npu_format_cast: a change of dtype"):
        linear.npu_format_cast(torch.zeros(2), 29, customize_dtype=3)
