"""The device's matrix products against float64, and where the CPU's own kernels are kept."""

from __future__ import annotations

import pytest
import torch
from torch_npu._sim import matmul

HALF = [torch.bfloat16, torch.float16]


def _operands(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, 96, generator=generator).to(dtype)
    right = torch.randn(96, 40, generator=generator).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype)
    return left, right, bias


def _bound(exact: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One rounding of the result, and float32 sums of 96 products."""
    sums = left.double().abs() @ right.double().abs()
    return exact.abs() * torch.finfo(dtype).eps + 96 * torch.finfo(torch.float32).eps * sums + 1e-6


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, matmul.MIN_ROWS - 1, matmul.MIN_ROWS, 64])
def test_mm_against_float64(rows: int, dtype: torch.dtype) -> None:
    left, right, _ = _operands(rows, dtype)
    out = torch.empty(rows, 40, dtype=dtype)
    assert matmul.mm_out(left, right, out=out) is out
    exact = left.double() @ right.double()
    assert ((out.double() - exact).abs() <= _bound(exact, left, right, dtype)).all()


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, -2)])
def test_addmm_against_float64(dtype: torch.dtype, beta: float, alpha: float) -> None:
    left, right, bias = _operands(16, dtype)
    out = torch.empty(16, 40, dtype=dtype)
    matmul.addmm_out(bias, left, right, beta=beta, alpha=alpha, out=out)
    exact = beta * bias.double() + alpha * (left.double() @ right.double())
    bound = _bound(exact, left, right, dtype) * abs(alpha) + bias.double().abs() * torch.finfo(torch.float32).eps
    # The CPU's own bfloat16 kernel may round the product before it adds the bias.
    twice = (alpha * (left.double() @ right.double())).abs() * torch.finfo(dtype).eps
    assert ((out.double() - exact).abs() <= bound + twice).all()


@pytest.mark.parametrize("dtype", HALF)
def test_native_numerics_are_the_cpu_s_own(dtype: torch.dtype, numerics: str) -> None:
    left, right, _ = _operands(64, dtype)
    out = matmul.mm_out(left, right, out=torch.empty(64, 40, dtype=dtype))
    expected = left @ right if numerics == "native" else (left.float() @ right.float()).to(dtype)
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("numerics")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    left, right, _ = _operands(16, dtype)
    assert torch.equal(matmul.mm_out(left, right, out=torch.empty(16, 40, dtype=dtype)), left @ right)


@pytest.mark.usefixtures("numerics")
def test_shapes_that_do_not_fit_are_refused() -> None:
    left, right, _ = _operands(16, torch.bfloat16)
    with pytest.raises(RuntimeError, match="shape"):
        matmul.mm_out(left, right.t(), out=torch.empty(16, 40, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        matmul.mm_out(left.float(), right, out=torch.empty(16, 40))
    with pytest.raises(RuntimeError):
        matmul.mm_out(left, right[0], out=torch.empty(16, 40, dtype=torch.bfloat16))
