from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simnpu_ops_reference import FLOATS, HALVES, assert_close, normal, refusal
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import rope

Tensor = torch.Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rotate vectors [..., D] by angles of which cos and sin [..., D] are given, pair by pair, in float64.

    Returns the result and the sums of the absolute values of both products.
    """
    x, cos, sin = x.double(), cos.double().expand(x.shape), sin.double().expand(x.shape)
    size = x.shape[-1]
    y, magnitude = torch.empty_like(x), torch.empty_like(x)
    for pair in range(size // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + size // 2)
        y[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        y[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
        magnitude[..., a] = (x[..., a] * cos[..., a]).abs() + (x[..., b] * sin[..., a]).abs()
        magnitude[..., b] = (x[..., b] * cos[..., b]).abs() + (x[..., a] * sin[..., b]).abs()
    return y, magnitude


def check(actual: Tensor, expected: tuple[Tensor, Tensor], numerics: str) -> None:
    # Natively two products and a sum are rounded, each relative to at most the sum of the absolute products.
    if numerics == "native":
        assert_close(actual, expected[0], expected[1], 2.1, 8)
    else:
        assert_close(actual, expected[0], expected[0], 1, 8, expected[1])


def cos_sin(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, width] of the angles of positions, each angle twice (first half, second half)."""
    frequencies = 100.0 ** -(torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    angles = torch.cat((positions[:, None] * frequencies,) * 2, dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def table(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A cos_sin_cache [rows, width]: cosines in the first half, sines in the second."""
    cos, sin = cos_sin(torch.arange(rows, dtype=torch.float64), width, torch.float64)
    return torch.cat((cos[:, : width // 2], sin[:, : width // 2]), dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("size", [64, 128])
def test_apply_rotary_rotates_in_place(numerics: str, dtype: torch.dtype, layout: str, size: int) -> None:
    query, key = normal(2, 3, 4, size, dtype=dtype), normal(2, 3, 2, size, dtype=dtype, seed=1)
    cos, sin = (one.view(2, 3, 1, size) for one in cos_sin(torch.arange(6, dtype=torch.float64) * 3, size, dtype))
    if layout == "TND":
        query, key, cos, sin = (one.flatten(0, 1) for one in (query, key, cos, sin))
    expected = [rotate(one, cos, sin, False) for one in (query, key)]
    returned = rope.npu_apply_rotary_pos_emb(query, key, cos, sin, layout)
    assert returned[0] is query
    assert returned[1] is key
    check(query, expected[0], numerics)
    check(key, expected[1], numerics)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype, mode: str) -> None:
    x = normal(2, 3, 4, 32, dtype=dtype)
    cos, sin = (one.view(1, 3, 1, 32) for one in cos_sin(torch.tensor([0.0, 5.0, 11.0]), 32, dtype))
    kept = x.clone()
    y = rope.npu_rotary_mul(x, cos, sin, mode)
    check(y, rotate(x, cos, sin, mode == "interleave"), numerics)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["half", "interleaved"])
@pytest.mark.parametrize("width", [32, 64])
def test_mrope_in_text_mode_leaves_the_rest_of_a_head(numerics: str, dtype: torch.dtype, mode: str, width: int) -> None:
    cache, positions = table(16, width, dtype), torch.tensor([0, 3, 15, 3])
    query, key = normal(4, 3 * 64, dtype=dtype), normal(4, 64, dtype=dtype, seed=1)
    outputs = rope.npu_mrope(positions, query, key, cache, 64, mrope_section=[0, 0, 0], rotary_mode=mode)
    interleaved = mode == "interleaved"
    for given_tensor, output in zip((query, key), outputs, strict=True):
        heads, turned = given_tensor.view(4, -1, 64), output.view(4, -1, 64)
        cos, sin = spread(cache, positions, interleaved)
        check(turned[..., :width], rotate(heads[..., :width], cos, sin, interleaved), numerics)
        assert torch.equal(turned[..., width:], heads[..., width:])
        assert output.shape == given_tensor.shape


def spread(cache: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Read cos and sin [T, 1, width] of positions from a cache, element by element of a head."""
    width = cache.shape[1]
    cos = torch.empty(len(positions), 1, width, dtype=torch.float64)
    sin = torch.empty_like(cos)
    for token, position in enumerate(positions.tolist()):
        for element in range(width):
            pair = element // 2 if interleaved else element % (width // 2)
            cos[token, 0, element] = cache[position, pair].double()
            sin[token, 0, element] = cache[position, width // 2 + pair].double()
    return cos, sin


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_rotary_embedding_rotates_in_place(numerics: str, dtype: torch.dtype, neox: bool, flat: bool) -> None:
    cache, positions = table(32, 64, dtype), torch.tensor([31, 0, 7, 7, 2])
    query, key = normal(5, 4, 64, dtype=dtype), normal(5, 2, 64, dtype=dtype, seed=1)
    cos, sin = spread(cache, positions, not neox)
    expected = [rotate(one, cos, sin, not neox) for one in (query, key)]
    shaped = [one.flatten(1) if flat else one for one in (query, key)]
    rope._npu_rotary_embedding(positions, shaped[0], shaped[1], 64, cache, neox)
    check(query, expected[0], numerics)
    check(key, expected[1], numerics)


@pytest.mark.parametrize("dtype", HALVES)
def test_rotary_embedding_takes_a_float32_table(numerics: str, dtype: torch.dtype) -> None:
    cache, positions = table(8, 64, torch.float32), torch.tensor([1, 5], dtype=torch.int32)
    query, key = normal(2, 64, dtype=dtype), normal(2, 64, dtype=dtype, seed=1)
    cos, sin = spread(cache, positions, False)
    expected, magnitude = rotate(query.view(2, 1, 64), cos, sin, False)
    rope._npu_rotary_embedding(positions, query, key, 64, cache, True)
    # Natively the table itself is rounded too.
    assert_close(query.view(2, 1, 64), expected, magnitude, 3.2 if numerics == "native" else 1, 8)


@given(st.lists(st.integers(0, 63), min_size=1, max_size=8), st.booleans())
@settings(max_examples=25, deadline=None)
def test_rotations_keep_lengths_and_depend_on_the_distance_alone(positions: list[int], neox: bool) -> None:
    cache = table(128, 32, torch.float32)
    query = normal(len(positions), 32, seed=3)
    near, far = query.clone(), query.clone()
    at = torch.tensor(positions)
    other = normal(len(positions), 32, seed=4)
    near_key, far_key = other.clone(), other.clone()
    rope._npu_rotary_embedding(at, near, near_key, 32, cache, neox)
    rope._npu_rotary_embedding(at + 64, far, far_key, 32, cache, neox)
    assert torch.allclose(near.norm(dim=-1), query.norm(dim=-1), rtol=1e-5)
    assert torch.allclose((near * near_key).sum(-1), (far * far_key).sum(-1), atol=1e-4)


APPLY: dict[str, Any] = {
    "query": torch.zeros(1, 3, 2, 64),
    "key": torch.zeros(1, 3, 1, 64),
    "cos": torch.zeros(1, 3, 1, 64),
    "sin": torch.zeros(1, 3, 1, 64),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "BNSD"}, "layout is 'BNSD'"),
        ({"rotary_mode": "interleave"}, "rotary_mode is 'interleave'"),
        ({name: torch.zeros(1, 3, 2, 32) for name in APPLY}, "head_dim of query is 32"),
        ({"key": torch.zeros(1, 4, 1, 64)}, "key is shape (1, 4, 1, 64)"),
        ({"cos": torch.zeros(1, 3, 2, 64)}, "cos is shape (1, 3, 2, 64)"),
        ({"cos": torch.zeros(1, 3, 1, 64, dtype=torch.float16)}, "cos is torch.float16"),
        ({"sin": torch.zeros(1, 3, 64)}, "sin is shape (1, 3, 64)"),
        ({"query": torch.zeros(3, 2, 64)}, "query is shape (3, 2, 64)"),
    ],
)
def test_apply_rotary_refuses(change: dict[str, Any], words: str) -> None:
    refusal("npu::npu_apply_rotary_pos_emb", rope.npu_apply_rotary_pos_emb, APPLY | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r1": torch.zeros(1, 3, 2, 16)}, "r1 is shape (1, 3, 2, 16)"),
        ({"r1": torch.zeros(1, 3, 1, 16)}, "r2 is shape (1, 3, 4, 16)"),
        ({"r2": torch.zeros(1, 3, 1, 8)}, "r2 is shape (1, 3, 1, 8)"),
        ({"rotary_mode": "quarter"}, "rotary_mode is 'quarter'"),
        ({"input": torch.zeros(3, 16)}, "input is shape (3, 16)"),
    ],
)
def test_rotary_mul_refuses(change: dict[str, Any], words: str) -> None:
    angles = torch.zeros(1, 3, 4, 16)
    given_arguments = {"input": torch.zeros(2, 3, 4, 16), "r1": angles, "r2": angles} | change
    refusal("npu::npu_rotary_mul", rope.npu_rotary_mul, given_arguments, words)


EMBEDDING: dict[str, Any] = {
    "positions": torch.tensor([0, 1]),
    "query": torch.zeros(2, 64),
    "key": torch.zeros(2, 32),
    "head_size": 32,
    "cos_sin_cache": torch.zeros(4, 32),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": torch.tensor([0, 4])}, "positions is from 0 to 4"),
        ({"positions": torch.tensor([0, -1])}, "positions is from -1 to 0"),
        ({"positions": torch.tensor([0.0, 1.0])}, "positions is torch.float32"),
        ({"query": torch.zeros(3, 64)}, "query is shape (3, 64)"),
        ({"query": torch.zeros(2, 48)}, "query is shape (2, 48)"),
        ({"key": torch.zeros(2, 32, dtype=torch.float16)}, "key is torch.float16"),
        ({"cos_sin_cache": torch.zeros(4, 32, dtype=torch.float16)}, "cos_sin_cache is torch.float16"),
        ({"cos_sin_cache": torch.zeros(128)}, "cos_sin_cache is shape (128,)"),
    ],
)
def test_table_rotations_refuse(change: dict[str, Any], words: str) -> None:
    arguments = EMBEDDING | change
    refusal("atb::_npu_rotary_embedding", rope._npu_rotary_embedding, arguments | {"is_neox_style": True}, words)
    refusal("npu::npu_mrope", rope.npu_mrope, arguments, words)


def test_rotary_embedding_refuses_a_partial_rotation() -> None:
    arguments = EMBEDDING | {"cos_sin_cache": torch.zeros(4, 16), "is_neox_style": True}
    message = refusal("atb::_npu_rotary_embedding", rope._npu_rotary_embedding, arguments, "cos_sin_cache is")
    assert "rotary part" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_size": 16, "cos_sin_cache": torch.zeros(4, 64)}, "cos_sin_cache is shape (4, 64)"),
        ({"head_size": 24}, "head_size is 24"),
        ({"cos_sin_cache": torch.zeros(4, 24)}, "rotary_dim of cos_sin_cache is 24"),
        ({"rotary_mode": "quarter"}, "rotary_mode is 'quarter'"),
        ({"cache_mode": "interleave"}, "cache_mode is 'interleave'"),
    ],
)
def test_mrope_refuses(change: dict[str, Any], words: str) -> None:
    refusal("npu::npu_mrope", rope.npu_mrope, EMBEDDING | change, words)


def test_what_is_left_out_says_so() -> None:
    with pytest.raises(UnsimulatedOperator, match="npu::npu_mrope: the multi-modal mode"):
        rope.npu_mrope(**EMBEDDING, mrope_section=[16, 24, 24])
    x = torch.zeros(2, 3, 4, 16)
    with pytest.raises(UnsimulatedOperator, match="npu::npu_rotary_mul: a rotation matrix"):
        rope.npu_rotary_mul(x, x, x, rotate=torch.zeros(16, 16))
