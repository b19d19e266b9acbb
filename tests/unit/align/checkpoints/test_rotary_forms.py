"""Rotary embeddings beside the whole-head neox form: partial and interleaved, against transformers' own code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PhiConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding, apply_rotary_pos_emb

from align.checkpoints import recompute
from align.checkpoints.bounds import bounds, unit_roundoff
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
POSITIONS = torch.tensor([0, 1, 63, 1500])


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_interleaved_pairs_are_those_of_gptj() -> None:
    x = normal(4, 3, 32, dtype=torch.float64)
    inverse, _ = recompute.rope_frequencies({"rope_theta": 1e4}, 32)
    angles = (POSITIONS.float()[:, None] * inverse).double()[None]
    wanted = gptj(x[None], angles.sin(), angles.cos())[0]
    found = recompute.rope(x.bfloat16(), POSITIONS, inverse, compute=torch.float64, interleaved=True)
    exact = gptj(x.bfloat16().double()[None], angles.sin(), angles.cos())[0]
    torch.testing.assert_close(found.value, exact, rtol=1e-12, atol=1e-12)
    assert float((found.value - wanted).abs().max()) > 0  # the input was rounded
    assert bool((found.magnitude >= found.value.abs()).all())


def test_partial_rotation_is_that_of_phi() -> None:
    config = PhiConfig(
        hidden_size=256,
        num_attention_heads=4,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    )
    x = normal(4, 4, 64, dtype=torch.float32)
    cos, sin = PhiRotaryEmbedding(config)(x, POSITIONS[None])
    turned, _ = apply_rotary_pos_emb(x[..., :32].transpose(0, 1)[None], x[..., :32].transpose(0, 1)[None], cos, sin)
    inverse, factor = recompute.rope_frequencies(config.rope_parameters, 64)
    found = recompute.rope(x, POSITIONS, inverse, factor).value
    torch.testing.assert_close(found[..., :32], turned[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[..., 32:], x[..., 32:])


def test_interleaving_a_partial_rotation_leaves_the_rest() -> None:
    x = normal(4, 2, 16)
    inverse, _ = recompute.rope_frequencies({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, 16)
    found = recompute.rope(x, POSITIONS, inverse, compute=torch.float64, interleaved=True).value
    assert torch.equal(found[..., 8:], x[..., 8:].double())
    angle = float((POSITIONS[3].float() * inverse[1]).double())
    a, b = x[3, 1, 2].double(), x[3, 1, 3].double()
    assert float(found[3, 1, 2]) == pytest.approx(float(a * torch.tensor(angle).double().cos() - b * _sin(angle)))
    assert float(found[3, 1, 3]) == pytest.approx(float(b * torch.tensor(angle).double().cos() + a * _sin(angle)))


def _sin(angle: float) -> Tensor:
    return torch.tensor(angle, dtype=torch.float64).sin()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(eager.DTYPES), st.sampled_from([0.02, 1.0, 300.0]))
def test_interleaved_kernels_stay_within_the_bound(seed: int, dtype: torch.dtype, size: float) -> None:
    x = normal(16, 2, 32, dtype=torch.float32, seed=seed).mul(size).to(dtype)
    positions = torch.randint(0, 4000, (16,), generator=torch.Generator().manual_seed(seed))
    inverse, _ = recompute.rope_frequencies({"rope_theta": 1e4}, 32)
    exact = recompute.rope(x, positions, inverse, compute=torch.float64, interleaved=True)
    angles = positions.float()[:, None] * inverse
    limit = bounds()["rope"].max_roundings * unit_roundoff(dtype) * 1.02
    rounded = gptj(x[None], angles.sin().to(dtype)[None], angles.cos().to(dtype)[None])[0]
    wide = gptj(x.float()[None], angles.sin()[None], angles.cos()[None])[0].to(dtype)
    for kernel in (rounded, wide):
        assert float(((kernel.double() - exact.value).abs() / exact.magnitude).max()) <= limit
