"""The calls that both engines make, in the forms of their sources: no ERROR, and each WARN is one that is explained.

vllm-ascend: ``attention_v1.py``, ``mla_v1.py``, ``device_op.py``; dlinfer: ``torch_npu_ops.py``, ``attention.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.fa import Context, check_attention

HEADS, KV, BLOCK = 4, 2, 128
FIA = "torch_npu.npu_fused_infer_attention_score"


def half(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def triangle(side: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(side, side).triu(1).to(dtype)


def heads(dim: int) -> dict[str, Any]:
    return {"num_heads": HEADS, "num_key_value_heads": KV, "scale": dim**-0.5}


def table() -> torch.Tensor:
    return torch.tensor([[1, 3], [2, 0]], dtype=torch.int32)


def vllm_prefill(dim: int) -> tuple[str, dict[str, Any]]:
    """Without a cache: cumulative lengths on both sides, and a block size without a table."""
    return FIA, {
        "query": half(8, HEADS, dim), "key": half(8, KV, dim), "value": half(8, KV, dim),
        "atten_mask": triangle(2048, torch.int8), "block_table": None, "input_layout": "TND", "block_size": BLOCK,
        "actual_seq_lengths": [3, 8], "actual_seq_lengths_kv": [3, 8], "sparse_mode": 3, **heads(dim),
    }  # fmt: skip


def vllm_decode(dim: int) -> tuple[str, dict[str, Any]]:
    """Over the viewed cache, with the mask and mode 3; key lengths as they are."""
    cache = half(6, BLOCK, KV, dim).view(6, BLOCK, -1)
    return FIA, {
        "query": half(2, HEADS, dim), "key": cache, "value": cache.clone(), "atten_mask": triangle(2048, torch.int8),
        "block_table": table(), "input_layout": "TND", "block_size": BLOCK, "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [130, 7], "sparse_mode": 3, **heads(dim),
    }  # fmt: skip


def vllm_history(dim: int) -> tuple[str, dict[str, Any]]:
    """Prefill behind cached tokens: a prefix hit, or the rest of a prompt."""
    operator, arguments = vllm_decode(dim)
    return operator, {**arguments, "query": half(8, HEADS, dim), "actual_seq_lengths": [3, 8]}


def dlinfer_prefill(dim: int) -> tuple[str, dict[str, Any]]:
    """ATB: lengths of sequences on the host, a mask in the model's dtype, the output in the query's memory."""
    query = half(8, HEADS, dim)
    return "torch.ops.atb._npu_flash_attention", {
        "query": query, "key": half(8, KV, dim), "value": half(8, KV, dim), "mask": triangle(5, torch.bfloat16),
        "seq_len": torch.tensor([3, 5], dtype=torch.int32), "scale_value": dim**-0.5, "num_heads": HEADS,
        "num_kv_heads": KV, "out": query,
    }  # fmt: skip


def dlinfer_decode(dim: int) -> tuple[str, dict[str, Any]]:
    """No mask and mode 0; lengths are tensors on the host."""
    cache = half(6, BLOCK, KV, dim).view(6, BLOCK, -1)
    return "torch.ops.npu.npu_fused_infer_attention_score", {
        "query": half(2, HEADS, dim), "key": cache, "value": cache.clone(), "atten_mask": None, "block_table": table(),
        "input_layout": "TND", "block_size": BLOCK, "actual_seq_lengths": torch.arange(1, 3, dtype=torch.int32),
        "actual_seq_lengths_kv": torch.tensor([130, 7], dtype=torch.int32), "sparse_mode": 0, **heads(dim),
    }  # fmt: skip


def dlinfer_history(dim: int) -> tuple[str, dict[str, Any]]:
    operator, arguments = dlinfer_decode(dim)
    more = {"atten_mask": triangle(2048, torch.bool), "sparse_mode": 3, "query": half(8, HEADS, dim)}
    return operator, {**arguments, **more, "actual_seq_lengths": torch.tensor([3, 8])}


CALLS = [
    (vllm_prefill, "prefill", (3, 5), (3, 5)),
    (vllm_history, "prefill", (3, 5), (130, 7)),
    (vllm_decode, "decode", (1, 1), (130, 7)),
    (dlinfer_prefill, "prefill", (3, 5), (3, 5)),
    (dlinfer_history, "prefill", (3, 5), (130, 7)),
    (dlinfer_decode, "decode", (1, 1), (130, 7)),
]


@pytest.mark.parametrize("dim", [128, 64])
@pytest.mark.parametrize(("make", "phase", "q", "kv"), CALLS, ids=[make.__name__ for make, *_ in CALLS])
def test_attention_of_both_engines_is_right(make: Any, phase: str, q: Any, kv: Any, dim: int) -> None:
    operator, arguments = make(dim)
    next_n = 0 if phase == "decode" else None
    known = Context(
        phase=phase, causal=True, window=0, next_n=next_n, q_lens=q, kv_lens=kv, scale=dim**-0.5, head_dim=dim,
        heads=2 * HEADS, kv_heads=2 * KV, ranks=2, dtype="bfloat16", device="cpu",
    )  # fmt: skip
    report = check_attention(operator, context=known, **arguments)
    assert report.of("ERROR", "WARN") == (), report.text()
    assert dict(report.unknown) == {}
    reminded = {one.rule for one in report.of("REMIND")}
    assert reminded == ({"fa.layout.packed-dim"} if dim == 64 and "fused" in operator else set())


def test_latent_attention_of_vllm_ascend_is_right() -> None:
    """Prefill with heads of their own, a part of a long context, and decode over the latent cache."""
    full = {
        "query": half(8, 16, 128), "key": half(8, 16, 128), "value": half(8, 16, 128), "query_rope": half(8, 16, 64),
        "key_rope": half(8, 16, 64), "num_heads": 16, "num_key_value_heads": 16, "input_layout": "TND",
        "atten_mask": triangle(2048, torch.int8), "sparse_mode": 3, "scale": 192**-0.5, "antiquant_mode": 0,
        "antiquant_scale": None, "block_table": None, "block_size": 0, "softmax_lse_flag": True,
        "actual_seq_lengths": [3, 8], "actual_seq_lengths_kv": [3, 8],
    }  # fmt: skip
    known = Context(phase="prefill", causal=True, scale=192**-0.5)
    assert check_attention(FIA, context=known, **full).of("ERROR", "WARN") == ()
    part = {**full, "atten_mask": None, "sparse_mode": 0, "actual_seq_lengths_kv": [1, 8]}
    assert check_attention(FIA, context=known, **part).of("ERROR", "WARN") == ()
    cache = half(6, 1, BLOCK, 512)
    decode = {
        "query": half(2, 16, 1, 512), "key": cache, "value": cache, "query_rope": half(2, 16, 1, 64),
        "key_rope": half(6, 1, BLOCK, 64), "num_query_heads": 16, "num_key_value_heads": 1,
        "input_layout": "BNSD_NBSD", "atten_mask": None, "sparse_mode": 0, "softmax_scale": 192**-0.5,
        "block_table": table(), "block_size": BLOCK, "actual_seq_qlen": None, "actual_seq_kvlen": [130, 7],
    }  # fmt: skip
    known = Context(phase="decode", causal=True, scale=192**-0.5, next_n=0)
    assert check_attention(f"{FIA}_v2", context=known, **decode).of("ERROR", "WARN") == ()


def test_latent_attention_of_dlinfer_is_right() -> None:
    known = Context(causal=True, scale=192**-0.5)
    latent = half(8, 1, 576)
    prefill = {
        "query": half(8, 16, 576), "key": latent, "value": latent[..., :512], "mask": triangle(5, torch.bfloat16),
        "seq_len": torch.tensor([3, 5], dtype=torch.int32), "scale_value": 192**-0.5, "num_heads": 16,
        "num_kv_heads": 1, "out": half(8, 16, 512),
    }  # fmt: skip
    report = check_attention("atb::_npu_flash_attention", context=known, phase="prefill", **prefill)
    assert report.of("ERROR", "WARN") == (), report.text()
    decode = {
        "query": half(2, 16, 576), "key_cache": half(6, BLOCK, 1, 576), "num_kv_heads": 1, "num_heads": 16,
        "scale_value": 192**-0.5, "block_table": table(), "context_lens": torch.tensor([130, 7], dtype=torch.int32),
        "mla_vheadsize": 512, "out": half(2, 16, 512),
    }  # fmt: skip
    report = check_attention("atb::_npu_paged_attention_mla", context=known, phase="decode", **decode)
    assert report.of("ERROR", "WARN") == (), report.text()


@pytest.mark.parametrize("operator", ["torch_npu.npu_scatter_pa_kv_cache", "torch_npu._npu_reshape_and_cache"])
def test_cache_writes_of_both_engines_are_right(operator: str) -> None:
    slots = "slot_mapping" if "scatter" in operator else "slot_indices"
    arguments: dict[str, Any] = {
        "key": half(3, KV, 128), "value": half(3, KV, 128), "key_cache": half(6, BLOCK, KV, 128),
        "value_cache": half(6, BLOCK, KV, 128), slots: torch.tensor([128, 129, 300], dtype=torch.int32),
    }  # fmt: skip
    if "scatter" in operator:
        arguments["cache_mode"] = "Norm"
    assert check_attention(operator, **arguments).findings == ()


def test_the_latent_write_of_dlinfer_is_right() -> None:
    arguments = (half(768, 1, 576), torch.tensor([[128], [300]]), half(2, 1, 576))
    assert check_attention("torch.ops.npu.npu_scatter_nd_update_.default", *arguments).findings == ()
