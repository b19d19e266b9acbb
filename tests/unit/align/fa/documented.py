"""Attention as the documents say that operators read their arguments, in float64; and attention as a model means it.

Written apart from :mod:`align.fa`, so that a rule is shown to be about something: what it flags changes the result, and
what it lets pass does not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

D = 16
SCALE = D**-0.5


def meant(q: Tensor, k: Tensor, v: Tensor, scale: float = SCALE, window: int = 0) -> Tensor:
    """Causal attention of one sequence: the last of ``q`` [Tq, N, D] sees all of ``k``, ``v`` [Tk, KV, D]."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    at = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    key = torch.arange(k.shape[0])
    hides = (key > at) | (key <= at - window if window else torch.zeros_like(key > at))
    scores = torch.einsum("qnd,knd->nqk", q, k) * scale
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(hides, -torch.inf).softmax(-1), v)


def fused(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """``npu_fused_infer_attention_score`` in TND, BSH and BNSD, with and without pages, sparse modes 0 to 4."""
    layout, heads = given.get("input_layout", "BSH"), given.get("num_heads", 1)
    kv_heads = given.get("num_key_value_heads", 0) or heads
    scale = given.get("scale", 1.0)
    out = torch.zeros(query.shape, dtype=torch.float64)
    for i, (rows, at) in enumerate(_queries(query, layout, heads, given.get("actual_seq_lengths"))):
        keys, values = (_keys(one, i, layout, kv_heads, given) for one in (key, value))
        if not rows.shape[0]:
            continue
        keys, values = (one.repeat_interleave(heads // kv_heads, dim=1).double() for one in (keys, values))
        scores = torch.einsum("qnd,knd->nqk", rows.double(), keys) * scale
        if given.get("query_rope") is not None:  # one side alone cannot take part
            rope, other = given["query_rope"], given.get("key_rope")
            if other is not None:
                scores = scores + torch.einsum("qnd,knd->nqk", rope[at].double(), other[at].double()) * scale
        hides = _hidden(i, rows.shape[0], keys.shape[0], given)
        weights = scores.masked_fill(hides, -torch.inf).softmax(-1).nan_to_num()
        result = torch.einsum("nqk,knd->qnd", weights, values)
        out[at] = result.transpose(0, 1) if layout == "BNSD" else result.reshape(out[at].shape)
    return out


def _queries(query: Tensor, layout: str, heads: int, lengths: Any) -> list[tuple[Tensor, Any]]:
    """Rows [S, N, D] of each sequence, and where they lie."""
    if layout == "TND":
        ends = [0, *lengths]
        spans = [slice(start, max(start, end)) for start, end in pairwise(ends)]
        return [(query[span], span) for span in spans]
    found = []
    for i in range(query.shape[0]):
        size = query.shape[2 if layout == "BNSD" else 1]
        length = size if lengths is None else lengths[i]
        at: Any = (i, slice(None), slice(0, length)) if layout == "BNSD" else (i, slice(0, length))
        rows = query[at].transpose(0, 1) if layout == "BNSD" else query[at].reshape(length, heads, -1)
        found.append((rows, at))
    return found


def _keys(store: Tensor, i: int, layout: str, kv_heads: int, given: dict[str, Any]) -> Tensor:
    lengths: Any = given.get("actual_seq_lengths_kv")
    if given.get("block_table") is not None:
        size, length = given["block_size"], lengths[i]
        blocks = [store[int(block)] for block in given["block_table"][i][: -(-length // size)]]
        return torch.cat([store[0][:0], *blocks])[:length].reshape(length, kv_heads, D)
    if layout == "TND":
        ends = [0, *lengths]
        return store[ends[i] : max(ends[i], ends[i + 1])]
    if layout == "BNSD":
        return store[i, :, : lengths[i] if lengths else None].transpose(0, 1)
    return store[i, : lengths[i] if lengths else None].reshape(-1, kv_heads, store.shape[-1] // kv_heads)


def _hidden(i: int, queries: int, keys: int, given: dict[str, Any]) -> Tensor:
    """The mask of one sequence: of modes 2 to 4 the compressed mask, moved to where the mode has its diagonal."""
    mode: int = given.get("sparse_mode", 0)
    mask: Any = given.get("atten_mask")
    none = torch.zeros(queries, keys, dtype=torch.bool)
    if mode in (0, 1):
        if mask is None:
            return none
        full: Tensor = mask.reshape(-1, *mask.shape[-2:]) != 0
        return full[i if full.shape[0] > 1 else 0, :queries, :keys]
    compressed: Tensor = mask != 0
    side: int = mask.shape[0]
    place = torch.arange(keys) - torch.arange(queries)[:, None] - (0 if mode == 2 else keys - queries)
    if mode == 4:
        before: int = given.get("pre_tokens", 2147483647)
        after: int = given.get("next_tokens", 2147483647)
        return (place < -before) | (place > after)
    # a place at distance d of the diagonal is hidden if the compressed mask is, at that distance
    middle = side // 2
    return compressed[middle, (middle + place).clamp(0, side - 1)]
