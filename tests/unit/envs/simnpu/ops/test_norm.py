from __future__ import annotations

from typing import Any

import pytest
import torch
from simnpu_ops_reference import FLOATS, assert_close, normal, refusal
from torch_npu._sim.ops import norm

Tensor = torch.Tensor


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """RMS norm over the last axis in float64, row by row."""
    rows = x.double().reshape(-1, x.shape[-1])
    y = torch.empty_like(rows)
    rstd = torch.empty(len(rows), dtype=torch.float64)
    for index, row in enumerate(rows):
        mean = sum(float(one) ** 2 for one in row) / len(row)
        rstd[index] = (mean + epsilon) ** -0.5
        y[index] = row * rstd[index] * gamma.double()
    return y.view(x.shape), rstd.view(*x.shape[:-1], 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 4, 32), (16,)])
@pytest.mark.parametrize("epsilon", [1e-5, 2.5, 0.0])
def test_rms_norm_is_within_rounding_of_float64(
    numerics: str, dtype: torch.dtype, shape: tuple[int, ...], epsilon: float
) -> None:
    x, gamma = 3 * normal(*shape, dtype=dtype), 1 + normal(shape[-1], dtype=dtype, seed=1)
    y, rstd = norm.npu_rms_norm(x, gamma, epsilon)
    expected, expected_rstd = rms_norm(x, gamma, epsilon)
    assert y.dtype == dtype
    assert rstd.dtype == torch.float32
    assert_close(y, expected, expected, 2 if numerics == "native" else 1, shape[-1] + 8)
    assert_close(rstd, expected_rstd, expected_rstd, 0, shape[-1] + 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rms_norm_takes_a_float32_weight(numerics: str, dtype: torch.dtype) -> None:
    x, gamma = normal(4, 32, dtype=dtype), 1 + normal(32, seed=2)
    y, _ = norm.npu_rms_norm(x, gamma)
    expected, _ = rms_norm(x, gamma, 1e-6)
    assert y.dtype == dtype
    assert_close(y, expected, expected, 3 if numerics == "native" else 1, 40)


def test_rms_norm_over_two_axes(numerics: str) -> None:
    x, gamma = normal(3, 4, 8), normal(4, 8, seed=3)
    y, rstd = norm.npu_rms_norm(x, gamma)
    flat, flat_rstd = rms_norm(x.view(3, 32), gamma.view(32), 1e-6)
    assert_close(y.view(3, 32), flat, flat, 2, 40)
    assert rstd.shape == (3, 1, 1)
    assert_close(rstd.view(3, 1), flat_rstd, flat_rstd, 0, 40)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 32)])
def test_gemma_rms_norm_adds_one_to_its_weight(numerics: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, gamma = 3 * normal(*shape, dtype=dtype), 0.3 * normal(shape[-1], dtype=dtype, seed=9)
    y, rstd = norm.npu_gemma_rms_norm(x, gamma, 1e-5)
    expected, expected_rstd = rms_norm(x, 1.0 + gamma.double(), 1e-5)
    assert (y.dtype, rstd.dtype) == (dtype, torch.float32)
    assert_close(y, expected, expected, 3 if numerics == "native" else 1, shape[-1] + 8)
    assert_close(rstd, expected_rstd, expected_rstd, 0, shape[-1] + 8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype) -> None:
    x1, x2 = normal(6, 48, dtype=dtype), 2 * normal(6, 48, dtype=dtype, seed=4)
    gamma = 1 + normal(48, dtype=dtype, seed=5)
    y, rstd, total = norm.npu_add_rms_norm(x1, x2, gamma, 1e-6)
    exact = x1.double() + x2.double()
    expected, expected_rstd = rms_norm(exact, gamma, 1e-6)
    native = numerics == "native"
    assert_close(total, exact, exact, 1, 2)
    assert_close(y, expected, expected, 4 if native else 1, 64)
    # Natively the rounding of the sum moves the mean square by at most twice the unit roundoff.
    coarse = rstd.to(torch.float64) / expected_rstd - 1
    assert coarse.abs().max() <= (1.01 * torch.finfo(dtype).eps if native else 0) + 64 * 2.0**-24
    assert (y.dtype, rstd.dtype, total.dtype) == (dtype, torch.float32, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm_bias_adds_the_bias_to_the_output(numerics: str, dtype: torch.dtype) -> None:
    x1, x2 = normal(6, 48, dtype=dtype), normal(6, 48, dtype=dtype, seed=6)
    gamma, beta = 1 + normal(48, dtype=dtype, seed=7), normal(48, dtype=dtype, seed=8)
    y, _, total = norm.npu_add_rms_norm_bias(x1, x2, gamma, beta, 1e-6)
    scaled, _ = rms_norm(x1.double() + x2.double(), gamma, 1e-6)
    expected = scaled + beta.double()
    assert_close(y, expected, scaled.abs() + beta.double().abs(), 5 if numerics == "native" else 1, 64)
    plain = norm.npu_add_rms_norm_bias(x1, x2, gamma, None, 1e-6)
    fused = norm.npu_add_rms_norm(x1, x2, gamma, 1e-6)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(plain, fused, strict=True))
    assert torch.equal(total, fused[2])


def test_inputs_are_left_alone(numerics: str) -> None:
    x1, x2, gamma = normal(3, 16), normal(3, 16, seed=1), normal(16)
    kept = [one.clone() for one in (x1, x2, gamma)]
    norm.npu_add_rms_norm(x1, x2, gamma)
    norm.npu_rms_norm(x1, gamma)
    assert all(torch.equal(now, then) for now, then in zip((x1, x2, gamma), kept, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.zeros(2, 8, dtype=torch.float64)}, "input is torch.float64"),
        ({"input": torch.zeros(2, 8, dtype=torch.int32)}, "input is torch.int32"),
        ({"gamma": torch.ones(4)}, "gamma is shape (4,)"),
        ({"gamma": torch.ones(8, dtype=torch.bfloat16)}, "gamma is torch.bfloat16"),
        ({"epsilon": -1e-6}, "epsilon is -1e-06"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"input": torch.zeros(0, 8)}, "input is empty"),
    ],
)
def test_rms_norm_refuses(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"input": torch.zeros(2, 8), "gamma": torch.ones(8), "epsilon": 1e-6}
    refusal("npu::npu_rms_norm", norm.npu_rms_norm, given | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x2": torch.zeros(2, 4)}, "x2 is shape (2, 4)"),
        ({"x2": torch.zeros(1, 8)}, "x2 is shape (1, 8)"),
        ({"x2": torch.zeros(2, 8, dtype=torch.float16)}, "x2 is torch.float16"),
        ({"gamma": torch.ones(2)}, "gamma is shape (2,)"),
        ({"epsilon": float("inf")}, "epsilon is inf"),
    ],
)
def test_add_rms_norms_refuse(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "x1": torch.zeros(2, 8),
        "x2": torch.zeros(2, 8),
        "gamma": torch.ones(8),
    } | change
    refusal("npu::npu_add_rms_norm", norm.npu_add_rms_norm, given, words)
    refusal("_C_ascend::npu_add_rms_norm_bias", norm.npu_add_rms_norm_bias, given, words)


@pytest.mark.parametrize("beta", [torch.zeros(4), torch.zeros(8, dtype=torch.float16), torch.zeros(1, 8)])
def test_add_rms_norm_bias_refuses_a_bias_unlike_gamma(beta: Tensor) -> None:
    given = {"x1": torch.zeros(2, 8), "x2": torch.zeros(2, 8), "gamma": torch.ones(8), "beta": beta}
    refusal("_C_ascend::npu_add_rms_norm_bias", norm.npu_add_rms_norm_bias, given, "beta is ")


def test_add_rms_norm_refuses_a_float32_weight_of_half_inputs() -> None:
    x = torch.zeros(2, 8, dtype=torch.float16)
    refusal("npu::npu_add_rms_norm", norm.npu_add_rms_norm, {"x1": x, "x2": x, "gamma": torch.ones(8)}, "gamma is")
