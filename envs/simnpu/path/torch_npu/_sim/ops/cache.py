"""Writes into the paged key/value cache."""

from __future__ import annotations

import torch

from .. import checks
from ..registry import operator

Tensor = torch.Tensor


def _check_rows(name: str, argument: str, rows: Tensor, cache: Tensor) -> None:
    """Check rows [T, heads, dim] against a cache [blocks, block size, heads, dim]."""
    cache_argument = f"{argument}_cache"
    checks.rank(name, argument, rows, (3,))
    checks.rank(name, cache_argument, cache, (4,))
    checks.same_dtype(name, cache_argument, cache, argument, rows)
    if cache.shape[2:] != rows.shape[1:]:
        accepted = f"[blocks, block size, heads, dim] with the heads and dim of {argument}, {checks.shape(rows)}"
        checks.fail(name, cache_argument, checks.shape(cache), accepted)


def _write(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    wanted = slots.long()
    kept = wanted >= 0
    if not bool(kept.all()):
        rows, wanted = rows[kept], wanted[kept]
    cache[wanted // cache.shape[1], wanted % cache.shape[1]] = rows


_CACHED = (torch.float16, torch.bfloat16, torch.int8)


@operator(
    "atb::_npu_reshape_and_cache",
    source="op-plugin op_plugin/ops/atb/ReshapeAndCachAtb.cpp, ATB ReshapeAndCacheOperation",
    faulted_input="key",
)
def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Write the rows of `key` and `value` into their caches, in place.

    key [T, KV, D], value [T, KV, Dv], caches [blocks, block size, KV, D or Dv], float16, bfloat16 or int8;
    slot_indices int32 [T] counts tokens over all blocks, -1 skips a padding row. T is at least 1, as on
    hardware.
    """
    name = "atb::_npu_reshape_and_cache"
    checks.dtype(name, "key", key, _CACHED)
    checks.same_dtype(name, "value", value, "key", key)
    checks.not_empty(name, "slot_indices", slot_indices)
    checks.dtype(name, "slot_indices", slot_indices, (torch.int32,))
    _check_rows(name, "key", key, key_cache)
    _check_rows(name, "value", value, value_cache)
    if key.shape[:2] != value.shape[:2]:
        checks.fail(name, "value", checks.shape(value), f"the tokens and heads of key, {checks.shape(key)}")
    if key_cache.shape[:2] != value_cache.shape[:2]:
        accepted = f"the blocks and block size of key_cache, {checks.shape(key_cache)}"
        checks.fail(name, "value_cache", checks.shape(value_cache), accepted)
    checks.slots(name, "slot_indices", slot_indices, key.shape[0], key_cache.shape[0] * key_cache.shape[1])
    _write(key, key_cache, slot_indices)
    _write(value, value_cache, slot_indices)


@operator(
    "atb::_npu_reshape_and_cache_siso",
    source="op-plugin op_plugin/ops/atb/ReshapeAndCacheSisoAtb.cpp",
    faulted_input="key",
)
def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """Write the rows of `key` alone into its cache, in place; see `_npu_reshape_and_cache`."""
    name = "atb::_npu_reshape_and_cache_siso"
    checks.dtype(name, "key", key, _CACHED)
    checks.not_empty(name, "slot_indices", slot_indices)
    checks.dtype(name, "slot_indices", slot_indices, (torch.int32,))
    _check_rows(name, "key", key, key_cache)
    checks.slots(name, "slot_indices", slot_indices, key.shape[0], key_cache.shape[0] * key_cache.shape[1])
    _write(key, key_cache, slot_indices)


@operator("npu::npu_scatter_pa_kv_cache", source="op-plugin docs, npu_scatter_pa_kv_cache", faulted_input="key")
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Write the rows of `key` and `value` into their caches, in place; only cache_mode 'Norm' is simulated.

    Shapes as in `_npu_reshape_and_cache`; slot_mapping int32 or int64 [T], -1 skips a padding row.
    """
    name = "npu::npu_scatter_pa_kv_cache"
    checks.choice(name, "cache_mode", cache_mode or "Norm", ("Norm", "PA_NZ"))
    if cache_mode == "PA_NZ":
        checks.unsimulated(name, "cache_mode='PA_NZ', the default (pass cache_mode='Norm' for a plain cache)")
    if compress_lens is not None or compress_seq_offsets is not None or seq_lens is not None:
        checks.unsimulated(name, "compression (compress_lens, compress_seq_offsets, seq_lens)")
    checks.dtype(name, "key", key, (*_CACHED, torch.float32))
    checks.same_dtype(name, "value", value, "key", key)
    checks.dtype(name, "slot_mapping", slot_mapping, checks.INDICES)
    _check_rows(name, "key", key, key_cache)
    _check_rows(name, "value", value, value_cache)
    if key.shape[:2] != value.shape[:2]:
        checks.fail(name, "value", checks.shape(value), f"the tokens and heads of key, {checks.shape(key)}")
    capacity = min(cache.shape[0] * cache.shape[1] for cache in (key_cache, value_cache))
    checks.slots(name, "slot_mapping", slot_mapping, key.shape[0], capacity)
    _write(key, key_cache, slot_mapping)
    _write(value, value_cache, slot_mapping)


@operator("npu::npu_scatter_nd_update_", source="op-plugin docs, npu_scatter_nd_update_", faulted_input="updates")
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Set input[indices[i]] = updates[i] in place and return `input` itself.

    indices int32 or int64 [..., A] with A at most input.dim(); updates [..., *input.shape[A:]] in the dtype
    of `input`.
    """
    name = "npu::npu_scatter_nd_update_"
    accepted = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)
    checks.dtype(name, "input", input, accepted)
    checks.rank(name, "input", input, range(1, 9))
    checks.dtype(name, "indices", indices, checks.INDICES)
    checks.same_dtype(name, "updates", updates, "input", input)
    checks.rank(name, "indices", indices, range(2, 9))
    depth = indices.shape[-1]
    if depth < 1 or depth > input.dim():
        checks.fail(name, "indices", checks.shape(indices), f"1 to {input.dim()} indices in the last axis")
    expected = (*indices.shape[:-1], *input.shape[depth:])
    checks.exact_shape(name, "updates", updates, expected, "that of indices without its last axis and of one update")
    columns = [column.long() for column in indices.unbind(-1)]
    for axis, column in enumerate(columns):
        if column.numel():
            low, high = (int(one) for one in torch.aminmax(column))
            if low < 0 or high >= input.shape[axis]:
                given = f"from {low} to {high} in axis {axis}"
                checks.fail(name, "indices", given, f"0 to {input.shape[axis] - 1}")
    input[tuple(columns)] = updates
    return input
