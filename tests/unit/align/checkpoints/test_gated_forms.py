"""Activations against transformers' ``ACT2FN``, and soft-capped products."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from align.checkpoints import recompute
from align.checkpoints.bounds import bounds, unit_roundoff
from align.checkpoints.recompute.gated import activation_of
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
NAMES = tuple(recompute.ACTIVATIONS)


def rows(dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Gates from tiny to strongly negative, ups with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    gate = torch.randn(24, 64, generator=generator) * torch.logspace(-3, 1.3, 24)[:, None]
    up = torch.randn(24, 64, generator=generator)
    up[:, 5] *= 100
    gate[:, 6] = -12
    return gate.to(dtype), up.to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_those_of_transformers(name: str) -> None:
    gate, up = rows(torch.bfloat16, 0)
    wanted = ACT2FN[name](gate.double()) * up.double()
    found = recompute.gated(gate, up, name, torch.float64)
    torch.testing.assert_close(found.value, wanted, rtol=1e-9, atol=1e-9)
    assert bool((found.magnitude >= found.value.abs()).all())


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_those_of_autograd(name: str) -> None:
    x = torch.linspace(-8, 8, 200, dtype=torch.float64).requires_grad_()
    function = activation_of(name)
    (wanted,) = torch.autograd.grad(function.value(x).sum(), x)
    torch.testing.assert_close(function.slope(x.detach()), wanted, rtol=0, atol=4e-3)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(eager.DTYPES), st.sampled_from(NAMES))
def test_right_kernels_stay_within_the_bound(seed: int, dtype: torch.dtype, name: str) -> None:
    gate, up = rows(dtype, seed)
    found = recompute.gated(gate, up, name, torch.float64)
    operator = "silu_mul" if name in ("silu", "swish") else "gelu_mul"
    limit = bounds()[operator].max_roundings * unit_roundoff(dtype) * 1.02
    native = ACT2FN[name](gate) * up
    inside = (ACT2FN[name](gate.float()) * up.float()).to(dtype)
    for kernel in (native, inside):
        error = ((kernel.double() - found.value).abs() / found.magnitude).masked_fill(kernel.isinf(), 0)
        assert float(error.max()) <= limit


def test_another_activation_is_beyond_and_an_unknown_one_refused() -> None:
    gate, up = rows(torch.bfloat16, 0)
    found = recompute.gated(gate, up, "gelu", torch.float64)
    wrong = torch.nn.functional.silu(gate).double() * up.double()
    assert float(((wrong - found.value).abs() / found.magnitude).max()) > 10 * 3 * 2**-8
    with pytest.raises(ValueError, match="'tanhshrink' is not recomputed; known: silu"):
        recompute.gated(gate, up, "tanhshrink")


@pytest.mark.parametrize("dtype", eager.DTYPES)
def test_capped_logits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).to(dtype) for n in (12, 40))
    plain = recompute.linear(x, weight, None, torch.float64)
    found = recompute.soft_cap(plain, 10.0)
    wanted = 10.0 * torch.tanh(x.double() @ weight.double().T / 10.0)
    torch.testing.assert_close(found.value, wanted, rtol=1e-12, atol=1e-12)
    native = torch.tanh((x.double() @ weight.double().T).to(dtype) / 10.0) * 10.0
    limit = bounds()["linear"].max_roundings * unit_roundoff(dtype) * 1.02
    assert float(((native.double() - found.value).abs() / found.magnitude).max()) <= limit
    without = (x.double() @ weight.double().T).to(dtype)
    assert float(((without.double() - found.value).abs() / found.magnitude).max()) > 3 * limit


@pytest.mark.parametrize("dtype", eager.DTYPES)
def test_a_factor_is_rounded_before_it_multiplies(dtype: torch.dtype) -> None:
    """As transformers' Gemma: sqrt(3072) = 55.43 is 55.5 in bfloat16."""
    x, factor = rows(dtype, 0)[0], 3072**0.5
    found = recompute.scaled(x, factor, torch.float64)
    rounded = torch.tensor(factor, dtype=dtype)
    assert torch.equal(found.value, x.double() * rounded.double())
    limit = bounds()["scale"].max_roundings * unit_roundoff(dtype) * 1.02
    assert float((((x * rounded).double() - found.value).abs() / found.magnitude).max()) <= limit


def test_a_gemma_norm_adds_one_to_its_weight() -> None:
    x, weight = rows(torch.bfloat16, 0)[0], torch.linspace(-0.5, 0.5, 64).bfloat16()
    wanted = torch.nn.functional.rms_norm(x.double(), (64,), 1 + weight.double(), 1e-6)
    found = recompute.rms_norm(x, weight, 1e-6, torch.float64, offset=1.0)
    torch.testing.assert_close(found.value, wanted, rtol=1e-9, atol=1e-9)
