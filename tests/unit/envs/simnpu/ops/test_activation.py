from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simnpu_ops_reference import FLOATS, assert_close, normal, refusal
from torch_npu._sim.ops import activation


def silu64(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) in float64, number by number."""
    values = [one / (1 + math.exp(-one)) for one in x.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), [((5, 32), -1), ((2, 3, 8), -1), ((4, 6), 0), ((3, 4, 5), 1)])
def test_swiglu_is_within_rounding_of_float64(
    numerics: str, dtype: torch.dtype, shape: tuple[int, ...], dim: int
) -> None:
    x = 4 * normal(*shape, dtype=dtype)
    y = activation.npu_swiglu(x, dim)
    half = shape[dim] // 2
    gate, up = x.narrow(dim, 0, half), x.narrow(dim, half, half)
    expected = silu64(gate) * up.double()
    assert y.dtype == dtype
    assert_close(y, expected, expected, 2 if numerics == "native" else 1, 16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype) -> None:
    x = 4 * normal(7, 9, dtype=dtype)
    expected = silu64(x)
    assert_close(activation.npu_silu(x), expected, expected, 1, 16)


def test_swiglu_gates_with_the_first_half(numerics: str) -> None:
    y = activation.npu_swiglu(torch.tensor([[0.0, 1.0, 5.0, 7.0]]))
    assert y[0, 0] == 0
    assert y[0, 1] == pytest.approx(7 / (1 + math.exp(-1)), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.zeros(2, 7)}, "input is shape (2, 7) with dim=-1"),
        ({"input": torch.zeros(2, 8, dtype=torch.int32)}, "input is torch.int32"),
        ({"dim": 2}, "dim is 2"),
        ({"dim": -3}, "dim is -3"),
        ({"input": torch.zeros(0, 8)}, "input is empty"),
        ({"input": torch.zeros(())}, "input is shape ()"),
    ],
)
def test_swiglu_refuses(change: dict[str, Any], words: str) -> None:
    refusal("npu::npu_swiglu", activation.npu_swiglu, {"input": torch.zeros(2, 8)} | change, words)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bool])
def test_silu_refuses_other_dtypes(dtype: torch.dtype) -> None:
    refusal("npu::npu_silu", activation.npu_silu, {"input": torch.zeros(2, 8, dtype=dtype)}, f"input is {dtype}")
