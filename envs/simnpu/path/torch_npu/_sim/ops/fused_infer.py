"""Fused-infer attention, versions 1 and 2."""

from __future__ import annotations

import torch

from .. import checks
from ..checks import IntList
from ..fused_core import UNLIMITED, Names, Request, fused_attention, refuse
from ..registry import operator

Tensor = torch.Tensor

_V1 = Names("npu::npu_fused_infer_attention_score")


@operator(
    _V1.operator,
    host=("actual_seq_lengths", "actual_seq_lengths_kv"),
    source="op-plugin docs, npu_fused_infer_attention_score",
)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: IntList | None = None,
    actual_seq_lengths_kv: IntList | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: IntList | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_rope_antiquant_scale: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention, float16 or bfloat16, in the layouts BSH, BSND, BNSD, BNSD_BSND and TND.

    TND: query [T, N, D] with cumulative `actual_seq_lengths`, the last equal to T; key and value [T, KV, D]
    with cumulative `actual_seq_lengths_kv`. With a `block_table` (int32 [B or more, blocks]) keys and values
    are caches [blocks, block_size, KV * D], or [blocks, KV, block_size, D] in BNSD and TND, and the key
    lengths are those of the single sequences. Sparse modes 0 to 4; modes 2, 3 and 4 take the causal 2048 x
    2048 mask. Returns (output like query, log-sum-exp float32 [B, N, S, 1] or [T, N, 1], or [0.0] without
    `softmax_lse_flag`).
    """
    refuse(_V1, "position shift", {"pse_shift": pse_shift})
    refuse(
        _V1,
        "quantisation",
        {
            "dequant_scale1": dequant_scale1,
            "quant_scale1": quant_scale1,
            "dequant_scale2": dequant_scale2,
            "quant_scale2": quant_scale2,
            "quant_offset2": quant_offset2,
            "antiquant_scale": antiquant_scale,
            "antiquant_offset": antiquant_offset,
            "key_antiquant_scale": key_antiquant_scale,
            "key_antiquant_offset": key_antiquant_offset,
            "value_antiquant_scale": value_antiquant_scale,
            "value_antiquant_offset": value_antiquant_offset,
            "key_rope_antiquant_scale": key_rope_antiquant_scale,
            "antiquant_mode": antiquant_mode,
            "key_antiquant_mode": key_antiquant_mode,
            "value_antiquant_mode": value_antiquant_mode,
        },
    )
    refuse(_V1, "left padding", {"query_padding_size": query_padding_size, "kv_padding_size": kv_padding_size})
    prefix = {"key_shared_prefix": key_shared_prefix, "value_shared_prefix": value_shared_prefix}
    refuse(_V1, "shared prefix", {**prefix, "actual_shared_prefix_len": actual_shared_prefix_len})
    refuse(_V1, "latent attention", {"query_rope": query_rope, "key_rope": key_rope})
    checks.choice(_V1.operator, "inner_precise", inner_precise, (0, 1, 2, 3))
    request = Request(
        layout=input_layout,
        num_heads=num_heads,
        num_kv_heads=num_key_value_heads,
        scale=scale,
        mask=atten_mask,
        query_lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        block_table=block_table,
        block_size=block_size,
        sparse_mode=sparse_mode,
        before=pre_tokens,
        after=next_tokens,
        want_total=softmax_lse_flag,
    )
    return fused_attention(_V1, request, query, key, value)


_V2 = Names(
    "npu::npu_fused_infer_attention_score_v2",
    heads="num_query_heads",
    scale="softmax_scale",
    query_lengths="actual_seq_qlen",
    kv_lengths="actual_seq_kvlen",
)


@operator(
    _V2.operator,
    host=("actual_seq_qlen", "actual_seq_kvlen"),
    source="op-plugin docs, npu_fused_infer_attention_score_v2",
)
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: IntList | None = None,
    actual_seq_kvlen: IntList | None = None,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **quantisation: Tensor | int | None,
) -> tuple[Tensor, Tensor]:
    """`npu_fused_infer_attention_score` under its second set of names, with `learnable_sink` [N] in layout
    TND.

    The arguments in `quantisation` (scales, offsets, modes and dtypes) must have their neutral values.
    """
    refuse(_V2, "position shift", {"pse_shift": pse_shift})
    refuse(_V2, "latent attention", {"query_rope": query_rope, "key_rope": key_rope})
    refuse(_V2, "quantisation", dict(quantisation))
    checks.choice(_V2.operator, "inner_precise", inner_precise, (0, 1, 2, 3))
    request = Request(
        layout=input_layout,
        num_heads=num_query_heads,
        num_kv_heads=num_key_value_heads,
        scale=softmax_scale,
        mask=atten_mask,
        query_lengths=actual_seq_qlen,
        kv_lengths=actual_seq_kvlen,
        block_table=block_table,
        block_size=block_size,
        sparse_mode=sparse_mode,
        before=pre_tokens,
        after=next_tokens,
        want_total=return_softmax_lse,
        sink=learnable_sink,
    )
    return fused_attention(_V2, request, query, key, value)
