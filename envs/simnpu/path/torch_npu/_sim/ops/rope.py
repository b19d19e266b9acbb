"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import checks
from ..numerics import internal
from ..registry import operator

Tensor = torch.Tensor


def _rotated(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _apply(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the last axis of `x`; `cos` and `sin` are as wide as it. Returns the dtype of `x`."""
    wide = internal(x)
    return (wide * cos.to(wide.dtype) + _rotated(wide, interleaved) * sin.to(wide.dtype)).to(x.dtype)


def _widened(half: Tensor, interleaved: bool) -> Tensor:
    return half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)


@operator("npu::npu_apply_rotary_pos_emb", source="op-plugin docs, npu_apply_rotary_pos_emb (Atlas A2/A3)")
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotate `query` and `key` in place and return them themselves.

    BSND: query [B, S, N, D], key [B, S, KV, D], cos and sin [B, S, 1, D]; TND the same without B. D is 64 or
    128. The schema does not say so, but the hardware writes in place: callers must not use the old values.
    """
    name = "npu::npu_apply_rotary_pos_emb"
    checks.choice(name, "layout", layout, ("BSND", "TND"))
    checks.choice(name, "rotary_mode", rotary_mode, ("half",))
    axes = 4 if layout == "BSND" else 3
    for argument, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        checks.dtype(name, argument, tensor, checks.FLOATS)
        checks.same_dtype(name, argument, tensor, "query", query)
        checks.rank(name, argument, tensor, (axes,))
        checks.not_empty(name, argument, tensor)
    if query.shape[-1] not in (64, 128):
        checks.fail(name, "head_dim of query", query.shape[-1], "64 or 128")
    tokens, size = query.shape[:-2], query.shape[-1]
    checks.exact_shape(name, "key", key, (*tokens, key.shape[-2], size), "the shape of query but for the heads")
    checks.exact_shape(name, "cos", cos, (*tokens, 1, size), "the shape of query with one head")
    checks.exact_shape(name, "sin", sin, cos.shape, "the shape of cos")
    for tensor in (query, key):
        tensor.copy_(_apply(tensor, cos, sin))
    return query, key


@operator("npu::npu_rotary_mul", source="op-plugin docs, npu_rotary_mul")
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return input * r1 + rotate(input) * r2 (r1 is cos, r2 is sin), out of place.

    `input` has 3 or 4 dimensions, `r1` and `r2` as many, each axis as long as that of `input` or 1, the last
    as long.
    """
    name = "npu::npu_rotary_mul"
    if rotate is not None:
        checks.unsimulated(name, "a rotation matrix (argument rotate)")
    checks.choice(name, "rotary_mode", rotary_mode, ("half", "interleave"))
    checks.dtype(name, "input", input, checks.FLOATS)
    checks.rank(name, "input", input, (3, 4))
    if input.shape[-1] % 2:
        checks.fail(name, "head_dim of input", input.shape[-1], "an even number")
    for argument, tensor in (("r1", r1), ("r2", r2)):
        checks.dtype(name, argument, tensor, checks.FLOATS)
        checks.rank(name, argument, tensor, (input.dim(),))
        fits = all(have in (1, want) for have, want in zip(tensor.shape, input.shape, strict=True))
        if not fits or tensor.shape[-1] != input.shape[-1]:
            accepted = f"axes of 1 or those of input, which has {checks.shape(input)}, and its last axis"
            checks.fail(name, argument, checks.shape(tensor), accepted)
    checks.exact_shape(name, "r2", r2, r1.shape, "the shape of r1")
    return _apply(input, r1, r2, rotary_mode == "interleave")


def _cos_sin(name: str, positions: Tensor, cache: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Look `positions` up in a cache [positions, rotary_dim] of cosines and sines, each half as wide."""
    checks.dtype(name, "positions", positions, checks.INDICES)
    checks.rank(name, "cos_sin_cache", cache, (2,))
    if cache.shape[1] % 2:
        checks.fail(name, "cos_sin_cache", checks.shape(cache), "an even rotary_dim")
    flat = positions.reshape(-1)
    checks.not_empty(name, "positions", flat)
    low, high = (int(one) for one in torch.aminmax(flat))
    if low < 0 or high >= cache.shape[0]:
        checks.fail(name, "positions", f"from {low} to {high}", f"0 to {cache.shape[0] - 1}, a row of cos_sin_cache")
    cos, sin = cache.index_select(0, flat).chunk(2, dim=-1)
    return _widened(cos, interleaved)[:, None], _widened(sin, interleaved)[:, None]


def _as_heads(name: str, argument: str, tensor: Tensor, tokens: int, head_size: int) -> Tensor:
    """View `tensor` [T, heads * head_size] or [T, heads, head_size] as the latter."""
    wide = tensor.shape[-1] % head_size == 0 if tensor.dim() == 2 else tensor.shape[-1] == head_size
    if tensor.shape[0] != tokens or not wide:
        accepted = f"{tokens} tokens, one for each position, and heads of head_size={head_size}"
        checks.fail(name, argument, checks.shape(tensor), accepted)
    return tensor.view(tokens, -1, head_size)


@operator("npu::npu_mrope", source="op-plugin docs, npu_mrope")
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Return `query` and `key` rotated, out of place; only the text mode (positions [T]) is simulated.

    query [T, N * head_size], key [T, KV * head_size], cos_sin_cache [positions, rotary_dim] of the same
    dtype. Only the first rotary_dim elements of a head are rotated.
    """
    name = "npu::npu_mrope"
    checks.choice(name, "rotary_mode", rotary_mode or "half", ("half", "interleaved"))
    if any(mrope_section or ()) or positions.dim() == 2:
        checks.unsimulated(name, "the multi-modal mode (mrope_section, two-dimensional positions)")
    checks.choice(name, "cache_mode", cache_mode or "default", ("default",))
    checks.rank(name, "positions", positions, (1,))
    checks.dtype(name, "query", query, checks.FLOATS)
    rotary_dim = cos_sin_cache.shape[-1]
    multiple = 16 if query.dtype == torch.float32 else 32
    for argument, size in (("head_size", head_size), ("rotary_dim of cos_sin_cache", rotary_dim)):
        if size < multiple or size % multiple:
            checks.fail(name, argument, size, f"a multiple of {multiple} for {query.dtype}")
    if rotary_dim > head_size:
        checks.fail(name, "cos_sin_cache", checks.shape(cos_sin_cache), f"at most head_size={head_size} wide")
    checks.same_dtype(name, "cos_sin_cache", cos_sin_cache, "query", query)
    interleaved = rotary_mode == "interleaved"
    cos, sin = _cos_sin(name, positions, cos_sin_cache, interleaved)
    outputs: list[Tensor] = []
    for argument, tensor in (("query", query), ("key", key)):
        checks.rank(name, argument, tensor, (2,))
        checks.same_dtype(name, argument, tensor, "query", query)
        per_head = _as_heads(name, argument, tensor.contiguous(), positions.shape[0], head_size)
        turned = _apply(per_head[..., :rotary_dim], cos, sin, interleaved)
        outputs.append(torch.cat((turned, per_head[..., rotary_dim:]), dim=-1).view(tensor.shape))
    return outputs[0], outputs[1]


@operator("atb::_npu_rotary_embedding", source="op-plugin op_plugin/ops/atb/RopeAtb.cpp, ATB RopeOperation")
def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """Rotate `query` and `key` in place.

    query [T, N * head_size] or [T, N, head_size], key likewise; cos_sin_cache [positions, head_size], in
    their dtype or float32. The hardware takes the size of a head from the cache, so a cache narrower than
    head_size (a partial rotary) would rotate wrong elements there; callers cut the rotary part out first.
    That is refused here.
    """
    name = "atb::_npu_rotary_embedding"
    checks.dtype(name, "query", query, checks.FLOATS)
    checks.same_dtype(name, "key", key, "query", query)
    if cos_sin_cache.dtype not in (query.dtype, torch.float32):
        checks.fail(name, "cos_sin_cache", cos_sin_cache.dtype, f"{query.dtype}, the dtype of query, or torch.float32")
    if head_size < 2 or head_size % 2:
        checks.fail(name, "head_size", head_size, "a positive even number")
    cos, sin = _cos_sin(name, positions, cos_sin_cache, not is_neox_style)
    if cos_sin_cache.shape[1] != head_size:
        accepted = f"a width of head_size={head_size}; pass the rotary part of query and key alone with its size"
        checks.fail(name, "cos_sin_cache", checks.shape(cos_sin_cache), accepted)
    for argument, tensor in (("query", query), ("key", key)):
        checks.rank(name, argument, tensor, (2, 3))
        per_head = _as_heads(name, argument, tensor, positions.numel(), head_size)
        per_head.copy_(_apply(per_head, cos, sin, not is_neox_style))
