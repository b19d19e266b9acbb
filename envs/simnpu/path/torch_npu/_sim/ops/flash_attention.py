"""Prompt and incremental flash attention."""

from __future__ import annotations

import torch

from .. import checks
from ..checks import IntList
from ..fused_core import UNLIMITED, Names, Request, fused_attention, refuse
from ..registry import operator

Tensor = torch.Tensor

_PROMPT = Names("npu::npu_prompt_flash_attention", scale="scale_value")


@operator(
    _PROMPT.operator,
    host=("actual_seq_lengths", "actual_seq_lengths_kv"),
    source="op-plugin docs, npu_prompt_flash_attention",
)
def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: IntList | None = None,
    deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: IntList | None = None,
    sparse_mode: int = 0,
) -> Tensor:
    """Prefill attention without a cache; the rest as in `npu_fused_infer_attention_score`."""
    refuse(_PROMPT, "reserved", {"padding_mask": padding_mask})
    refuse(_PROMPT, "position shift", {"pse_shift": pse_shift})
    scales = {"deq_scale1": deq_scale1, "quant_scale1": quant_scale1, "deq_scale2": deq_scale2}
    refuse(_PROMPT, "quantisation", {**scales, "quant_scale2": quant_scale2, "quant_offset2": quant_offset2})
    request = Request(
        layout=input_layout,
        num_heads=num_heads,
        num_kv_heads=num_key_value_heads,
        scale=scale_value,
        mask=atten_mask,
        query_lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        block_table=None,
        block_size=0,
        sparse_mode=sparse_mode,
        before=pre_tokens,
        after=next_tokens,
    )
    return fused_attention(_PROMPT, request, query, key, value)[0]


_INCREMENTAL = Names("npu::npu_incre_flash_attention", scale="scale_value", kv_lengths="actual_seq_lengths")


@operator(_INCREMENTAL.operator, host=("actual_seq_lengths",), source="op-plugin docs, npu_incre_flash_attention")
def npu_incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: IntList | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
) -> Tensor:
    """Decode attention: one query a sequence, BSH, BSND or BNSD; `actual_seq_lengths` counts the keys."""
    op = _INCREMENTAL.operator
    refuse(_INCREMENTAL, "reserved", {"padding_mask": padding_mask})
    refuse(_INCREMENTAL, "position shift", {"pse_shift": pse_shift})
    refuse(_INCREMENTAL, "left padding", {"kv_padding_size": kv_padding_size})
    scales = {
        "dequant_scale1": dequant_scale1,
        "quant_scale1": quant_scale1,
        "dequant_scale2": dequant_scale2,
    }
    anti = {"antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset}
    outer = {"quant_scale2": quant_scale2, "quant_offset2": quant_offset2}
    refuse(_INCREMENTAL, "quantisation", {**scales, **anti, **outer})
    checks.choice(op, "inner_precise", inner_precise, (0, 1))
    checks.choice(op, "input_layout", input_layout, ("BSH", "BSND", "BNSD"))
    tokens = query.shape[2 if input_layout == "BNSD" else 1] if query.dim() > 2 else 0
    if tokens != 1:
        checks.fail(op, "query", checks.shape(query), "one token for each sequence")
    request = Request(
        layout=input_layout,
        num_heads=num_heads,
        num_kv_heads=num_key_value_heads,
        scale=scale_value,
        mask=atten_mask,
        query_lengths=None,
        kv_lengths=actual_seq_lengths,
        block_table=block_table,
        block_size=block_size,
        sparse_mode=0,
        before=UNLIMITED,
        after=UNLIMITED,
    )
    return fused_attention(_INCREMENTAL, request, query, key, value)[0]
