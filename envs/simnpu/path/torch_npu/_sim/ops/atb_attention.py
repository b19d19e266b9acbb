"""The attention operators of ATB: prefill on packed tokens and decode on a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import checks
from ..attention_core import Packed, Paged, Store, attend
from ..registry import operator

Tensor = torch.Tensor


def _as_heads(name: str, argument: str, tensor: Tensor, heads: int) -> Tensor:
    """View [T, heads * D] or [T, heads, D] as the latter, and check D."""
    checks.rank(name, argument, tensor, (2, 3))
    if tensor.dim() == 2:
        if tensor.shape[1] % heads:
            checks.fail(name, argument, checks.shape(tensor), f"[tokens, heads * dim] with {heads} heads")
        tensor = tensor.view(tensor.shape[0], heads, -1)
    if tensor.shape[1] != heads:
        checks.fail(name, argument, checks.shape(tensor), f"[tokens, heads, dim] with {heads} heads")
    checks.head_dim(name, argument, tensor.shape[2])
    return tensor


def _output(name: str, out: Tensor, query: Tensor, width: int) -> Tensor:
    """View `out` as [T, heads, width]. It may share the memory of `query`."""
    checks.same_dtype(name, "out", out, "query", query)
    expected = query.shape[0] * query.shape[1] * width
    if out.numel() != expected or out.shape[0] != query.shape[0]:
        checks.fail(name, "out", checks.shape(out), f"the tokens, heads and dim of the output, {expected} elements")
    return out.view(query.shape[0], query.shape[1], width)


def _prefill(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seq_len: Tensor,
    scale: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    checks.dtype(name, "query", query, checks.HALVES)
    checks.scale(name, "scale_value", scale)
    kv_heads = checks.heads(name, "num_heads", num_heads, "num_kv_heads", num_kv_heads)
    query = _as_heads(name, "query", query, num_heads)
    rows: dict[str, Tensor] = {}
    for argument, tensor in (("key", key), ("value", value)):
        checks.same_dtype(name, argument, tensor, "query", query)
        rows[argument] = _as_heads(name, argument, tensor, kv_heads)
        if tensor.shape[0] != query.shape[0]:
            checks.fail(name, argument, checks.shape(tensor), f"{query.shape[0]} tokens, as many as query has")
    if rows["key"].shape[2] != query.shape[2]:
        checks.fail(name, "key", checks.shape(key), f"head_dim {query.shape[2]}, that of query")
    output = _output(name, out, query, rows["value"].shape[2])
    checks.dtype(name, "seq_len", seq_len, (torch.int32,))
    lengths = checks.host_integers(name, "seq_len", seq_len)
    checks.raw_lengths(name, "seq_len", lengths, 1, query.shape[0], "the number of tokens")
    if sum(lengths) != query.shape[0]:
        checks.fail(name, "seq_len", f"{lengths}, in sum {sum(lengths)}", f"a sum of {query.shape[0]} tokens")
    flags = None if mask is None else _square_mask(name, mask, query.dtype, max(lengths))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    keys, values = Packed(rows["key"], ends), Packed(rows["value"], ends)
    start = 0
    for index, length in enumerate(lengths):
        masked = None if flags is None else flags[:length, :length]
        here = slice(start, start + length)
        output[here] = attend(query[here], keys[index], values[index], scale, masked)[0]
        start += length


def _square_mask(name: str, mask: Tensor, dtype: torch.dtype, longest: int) -> Tensor:
    """Check a mask [S, S] in the dtype of the model and return it as bool, true where it hides."""
    checks.dtype(name, "mask", mask, (dtype,))
    checks.rank(name, "mask", mask, (2,))
    if min(mask.shape) < longest:
        checks.fail(name, "mask", checks.shape(mask), f"at least ({longest}, {longest}), the longest sequence")
    used = mask[:longest, :longest]
    flags = used != 0
    if not bool((~flags | (used == 1) | (used <= -10000)).all()):
        checks.fail(name, "mask", "of other numbers", "0 where a query looks; 1, or at most -10000, where it must not")
    return flags


@operator(
    "atb::_npu_flash_attention",
    host=("seq_len",),
    source="op-plugin op_plugin/ops/atb/SelfAttentionAtb.cpp (PA_ENCODER, MASK_TYPE_NORM)",
)
def _npu_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    """Attention of packed sequences to themselves, into `out`, which may be the memory of `query`.

    query [T, N, D] or [T, N * D], key and value [T, KV, D] likewise, float16 or bfloat16; mask [S, S] in
    their dtype, S at least the longest sequence, 0 where a query looks; seq_len int32, on the host, in sum T;
    out like query.
    """
    name = "atb::_npu_flash_attention"
    _prefill(name, query, key, value, mask, seq_len, scale_value, num_heads, num_kv_heads, out)


@operator(
    "atb::_npu_flash_attention_unpad",
    host=("seq_len",),
    source="op-plugin op_plugin/ops/atb/SelfAttentionUnpadAtb.cpp (PA_ENCODER)",
)
def _npu_flash_attention_unpad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    """`_npu_flash_attention` without a mask: every token looks at its whole sequence."""
    name = "atb::_npu_flash_attention_unpad"
    _prefill(name, query, key, value, None, seq_len, scale_value, num_heads, num_kv_heads, out)


def _check_cache(name: str, argument: str, cache: Tensor, query: Tensor, heads: int) -> None:
    checks.rank(name, argument, cache, (4,))
    checks.same_dtype(name, argument, cache, "query", query)
    if cache.shape[2] != heads:
        checks.fail(name, argument, checks.shape(cache), f"[blocks, block size, heads, dim] with {heads} heads")
    checks.block_size(name, f"block size of {argument}", cache.shape[1], 16, 512)
    checks.head_dim(name, argument, cache.shape[3])


@operator(
    "atb::_npu_paged_attention",
    host=("context_lens",),
    source="op-plugin op_plugin/ops/atb/PagedAttentionAtb.cpp, ATB PagedAttentionOperation",
)
def _npu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    """Attention of one query for each sequence to its paged keys, into `out`.

    query [B, N, D] or [B, N * D], caches [blocks, block size, KV, D], float16 or bfloat16; block_table int32
    [B or more, blocks per sequence]; context_lens int32 [B], on the host or the device, 1 at least; out like
    query.
    """
    name = "atb::_npu_paged_attention"
    checks.dtype(name, "query", query, checks.HALVES)
    checks.scale(name, "scale_value", scale_value)
    kv_heads = checks.heads(name, "num_heads", num_heads, "num_kv_heads", num_kv_heads)
    query = _as_heads(name, "query", query, num_heads)
    _check_cache(name, "key_cache", key_cache, query, kv_heads)
    _check_cache(name, "value_cache", value_cache, query, kv_heads)
    checks.exact_shape(name, "value_cache", value_cache, key_cache.shape, "the shape of key_cache")
    if key_cache.shape[3] != query.shape[2]:
        checks.fail(name, "key_cache", checks.shape(key_cache), f"head_dim {query.shape[2]}, that of query")
    output = _output(name, out, query, value_cache.shape[3])
    checks.dtype(name, "context_lens", context_lens, (torch.int32,))
    lengths = checks.host_integers(name, "context_lens", context_lens)
    if len(lengths) != query.shape[0]:
        checks.fail(name, "context_lens", f"{len(lengths)} long", f"{query.shape[0]} lengths, one for each query")
    blocks, tokens = key_cache.shape[:2]
    checks.raw_lengths(name, "context_lens", lengths, 1, blocks * tokens, "the tokens that the cache holds")
    needed = checks.block_table(name, "block_table", block_table, lengths, tokens, blocks)
    keys = Paged(key_cache, needed, lengths, False)
    values = Paged(value_cache, needed, lengths, False)
    _decode(query, keys, values, scale_value, lengths, output)


def _decode(query: Tensor, keys: Store, values: Store, scale: float, lengths: Sequence[int], output: Tensor) -> None:
    for index in range(len(lengths)):
        here = slice(index, index + 1)
        output[here] = attend(query[here], keys[index], values[index], scale)[0]
