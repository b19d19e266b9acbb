"""The recomputed operators against transformers, float64 and brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from align.checkpoints import recompute
from align.checkpoints.bounds import unit_roundoff
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
BF16 = torch.bfloat16
LENGTH = 2048
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    "yarn-factor": {**YARN, "attention_factor": 1.25, "truncate": False},
}


def config(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 500000.0, **rope},
    )


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("seq_len", [None, 100, 5000])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str, seq_len: int | None) -> None:
    described = config(ROPES[name])
    wanted, factor = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]](described, seq_len=seq_len)
    given = {**described.rope_parameters, "max_position_embeddings": LENGTH}
    found, found_factor = recompute.rope_frequencies(given, 64, seq_len)
    assert torch.equal(found, wanted)
    assert found_factor == factor


def test_default_rope_is_that_of_transformers() -> None:
    described = config({"rope_type": "default"})
    module = LlamaRotaryEmbedding(described)
    inverse, factor = recompute.rope_frequencies(described.rope_parameters, 64)
    assert torch.equal(inverse, module.inv_freq)
    positions = torch.tensor([0, 1, 17, 2000])
    x = normal(4, 3, 64, dtype=torch.float32)
    cos, sin = module(x, positions[None])
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    found = recompute.rope(x, positions, inverse, factor)
    torch.testing.assert_close(found.value, wanted[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
    assert bool((found.magnitude >= found.value.abs() * (1 - 1e-6)).all())


def test_rope_hands_on_what_is_beyond_a_partial_rotary_factor() -> None:
    inverse, factor = recompute.rope_frequencies({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, 64)
    x = normal(2, 1, 64)
    found = recompute.rope(x, torch.tensor([3, 4]), inverse, factor).value
    assert torch.equal(found[..., 32:], x[..., 32:].float())
    whole, _ = recompute.rope_frequencies({"rope_theta": 1e4}, 32)
    assert torch.equal(found[..., :32], recompute.rope(x[..., :32], torch.tensor([3, 4]), whole).value)


def test_unknown_or_incomplete_rope_is_refused() -> None:
    with pytest.raises(ValueError, match=r"longrope.*known: default"):
        recompute.rope_frequencies({"rope_type": "longrope", "rope_theta": 1e4}, 64)
    with pytest.raises(ValueError, match="needs 'max_position_embeddings'"):
        recompute.rope_frequencies({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 64)


def test_rms_norm_of_rows_and_of_heads() -> None:
    x, weight = normal(2, 5, 3, 16), normal(16, seed=1)
    found = recompute.rms_norm(x, weight, 1e-5, torch.float64).value
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(3)):
        row = x[tuple(index)].double()
        wanted = row / (row.square().sum() / 16 + 1e-5).sqrt() * weight.double()
        torch.testing.assert_close(found[tuple(index)], wanted, rtol=1e-12, atol=1e-12)


def test_linear_with_bias() -> None:
    x, weight, bias = normal(4, 24), normal(7, 24, seed=1), normal(7, seed=2)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    found = recompute.linear(x, weight, bias, torch.float64)
    torch.testing.assert_close(found.value, wanted, rtol=1e-12, atol=1e-12)
    assert found.magnitude.shape == wanted.shape
    # The sum before the bias may be rounded, so cancellation against the bias must not shrink the magnitude.
    product = (x.double() @ weight.double().T).abs()
    assert bool((found.magnitude >= product).all())


def test_silu_mul_add_identity_and_embedding() -> None:
    a, b = normal(3, 8), normal(3, 8, seed=1)
    wanted = a.double() / (1 + (-a.double()).exp()) * b.double()
    torch.testing.assert_close(recompute.silu_mul(a, b, torch.float64).value, wanted, rtol=1e-12, atol=0)
    assert torch.equal(recompute.add(a, b).value, a.float() + b.float())
    assert torch.equal(recompute.identity(a).value, a.float())
    ids = torch.tensor([2, 0, 2])
    assert torch.equal(recompute.embedding(ids, a).value, a.float()[ids])


def slow_attention(
    query: Tensor, positions: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """One row, one head, one key at a time."""
    result = torch.zeros(query.shape, dtype=torch.float64)
    groups = query.shape[1] // keys.shape[1]
    for row, position in enumerate(positions.tolist()):
        seen = [j for j in range(len(keys)) if j <= position and (window is None or position - j < window)]
        for head in range(query.shape[1]):
            scores = [float(query[row, head].double() @ keys[j, head // groups].double()) * scale for j in seen]
            total = sum(torch.tensor(scores, dtype=torch.float64).exp())
            for j, score in zip(seen, scores, strict=True):
                weight = torch.tensor(score, dtype=torch.float64).exp() / total
                result[row, head] += weight * values[j, head // groups].double()
    return result


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("positions", [[0], [5, 9, 2], [9]])
def test_attention_against_one_key_at_a_time(positions: list[int], window: int | None) -> None:
    at = torch.tensor(positions)
    query, keys, values = normal(len(at), 4, 8), normal(10, 2, 8, seed=1), normal(10, 2, 8, seed=2)
    wanted = slow_attention(query, at, keys, values, 0.4, window)
    found = recompute.attention(query, at, keys, values, 0.4, window, torch.float64)
    torch.testing.assert_close(found.value, wanted, rtol=1e-10, atol=1e-12)
    single = recompute.attention(query, at, keys.float(), values.float(), 0.4, window)
    torch.testing.assert_close(single.value.double(), wanted, rtol=1e-4, atol=1e-5)


def test_the_magnitude_of_attention_by_brute_force() -> None:
    query, keys, values = normal(1, 1, 4), normal(6, 1, 4, seed=1), normal(6, 1, 4, seed=2)
    found = recompute.attention(query, torch.tensor([5]), keys, values, 0.5, None, torch.float64)
    q, k, v = query.double()[0, 0], keys.double()[:, 0], values.double()[:, 0]
    scores = k @ q * 0.5
    weights = scores.softmax(0)
    out = weights @ v
    extra = max(1.0, float(q.square().sum() * k.square().sum(1).mean() * 0.25 / 4))
    moved = (weights**2 * (scores**2 + extra))[:, None] * (v - out) ** 2
    wanted = out.abs() + (moved + (weights**2)[:, None] * v**2).sum(0).sqrt()
    torch.testing.assert_close(found.magnitude[0, 0], wanted, rtol=1e-9, atol=1e-12)


def test_layers_are_free_axes() -> None:
    at = torch.tensor([3, 4])
    query, keys, values = normal(2, 2, 4, 8), normal(2, 5, 2, 8, seed=1), normal(2, 5, 2, 8, seed=2)
    inverse, _ = recompute.rope_frequencies({"rope_theta": 1e4}, 8)
    together = recompute.attention(query, at, keys, values, 0.3)
    turned = recompute.rope(query, at, inverse)
    for layer in range(2):
        alone = recompute.attention(query[layer], at, keys[layer], values[layer], 0.3)
        torch.testing.assert_close(together.value[layer], alone.value)
        torch.testing.assert_close(together.magnitude[layer], alone.magnitude)
        torch.testing.assert_close(turned.magnitude[layer], recompute.rope(query[layer], at, inverse).magnitude)


@pytest.mark.parametrize("dtype", eager.DTYPES)
def test_no_element_of_a_right_kernel_errs_more_than_its_roundings(dtype: torch.dtype) -> None:
    """The bound itself, element by element in float64, on rows with cancellation and outliers."""
    unit = unit_roundoff(dtype)
    x = normal(64, 128, dtype=dtype)
    x[:, 7] *= 300
    weight = normal(128, dtype=dtype, seed=1)
    exact = recompute.rms_norm(x, weight, 1e-5, torch.float64)
    for norm in eager.NORMS:
        assert float(((norm(x, weight, 1e-5).double() - exact.value).abs() / exact.magnitude).max()) <= 3 * unit
    gate, up = x[:, :64], x[:, 64:]
    exact = recompute.silu_mul(gate, up, torch.float64)
    for silu in eager.SILUS:
        assert float(((silu(gate, up).double() - exact.value).abs() / exact.magnitude).max()) <= 3 * unit
    inverse, _ = recompute.rope_frequencies({"rope_theta": 1e4}, 64)
    heads, at = x.view(64, 2, 64), torch.arange(64) * 50
    exact = recompute.rope(heads, at, inverse, compute=torch.float64)
    for turn in eager.ROPES:
        assert float(((turn(heads, at, inverse).double() - exact.value).abs() / exact.magnitude).max()) <= 3 * unit
