from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simnpu_ops_reference import HALVES, assert_attention_close, attention, normal, refusal
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import flash_attention

Tensor = torch.Tensor
HEADS, KV, DIM = 4, 2, 32
SCALE = 1 / math.sqrt(DIM)
COMMON: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": KV, "scale_value": SCALE}
PROMPT, DECODE = "npu::npu_prompt_flash_attention", "npu::npu_incre_flash_attention"
prompt = flash_attention.npu_prompt_flash_attention
decode = flash_attention.npu_incre_flash_attention


def batch(tokens: int, span: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Query [2, tokens, HEADS, DIM], key and value [2, span, KV, DIM]."""
    query = normal(2, tokens, HEADS, DIM, dtype=dtype)
    key, value = (normal(2, span, KV, DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    return query, key, value


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_prompt_without_a_mask_ignores_next_tokens(numerics: str, dtype: torch.dtype, layout: str) -> None:
    query, key, value = batch(3, 3, dtype)
    shaped = [arrange(one, layout) for one in (query, key, value)]
    output = prompt(*shaped, input_layout=layout, **COMMON)
    for index in range(2):
        expected = attention(query[index], key[index], value[index], SCALE, lambda i, j: True)
        assert_attention_close(restore(output, layout)[index], expected, numerics, 3, DIM)


@pytest.mark.parametrize("dtype", HALVES)
def test_prompt_with_a_mask_looks_no_further_than_next_tokens(numerics: str, dtype: torch.dtype) -> None:
    query, key, value = batch(4, 4, dtype)
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[3, 1] = True
    output = prompt(query, key, value, atten_mask=mask, input_layout="BSND", **COMMON)
    for index in range(2):
        expected = attention(query[index], key[index], value[index], SCALE, lambda i, j: j <= i and (i, j) != (3, 1))
        assert_attention_close(output[index], expected, numerics, 4, DIM)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_decode_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype, layout: str) -> None:
    query, key, value = batch(1, 9, dtype)
    shaped = [arrange(one, layout) for one in (query, key, value)]
    output = decode(*shaped, input_layout=layout, actual_seq_lengths=[9, 4], **COMMON)
    for index, span in enumerate((9, 4)):
        expected = attention(query[index], key[index, :span], value[index, :span], SCALE, lambda i, j: True)
        assert_attention_close(restore(output, layout)[index], expected, numerics, span, DIM)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_decode_from_pages(numerics: str, dtype: torch.dtype, layout: str) -> None:
    query, key, value = batch(1, 32, dtype)
    # Blocks 3, 1 hold the first sequence, 0, 2 the second.
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    caches: list[Tensor] = []
    for rows in (key, value):
        cache = torch.empty(4, 16, KV, DIM, dtype=dtype)
        for index in range(2):
            for at in range(32):
                cache[int(table[index, at // 16]), at % 16] = rows[index, at]
        caches.append(cache.flatten(2) if layout == "BSH" else cache.transpose(1, 2).contiguous())
    pages = {"block_table": table, "block_size": 16, "actual_seq_lengths": [25, 16]}
    output = decode(arrange(query, layout), *caches, input_layout=layout, **pages, **COMMON)
    for index, span in enumerate((25, 16)):
        expected = attention(query[index], key[index, :span], value[index, :span], SCALE, lambda i, j: True)
        assert_attention_close(restore(output, layout)[index], expected, numerics, span, DIM)


def arrange(tensor: Tensor, layout: str) -> Tensor:
    """Bring [B, S, N, D] into a layout."""
    if layout == "BSH":
        return tensor.flatten(2)
    return tensor.transpose(1, 2).contiguous() if layout == "BNSD" else tensor


def restore(tensor: Tensor, layout: str) -> Tensor:
    """Bring an output in a layout back to [B, S, HEADS, DIM]."""
    if layout == "BSH":
        return tensor.view(*tensor.shape[:2], HEADS, DIM)
    return tensor.transpose(1, 2) if layout == "BNSD" else tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_layout": "BSN"}, "input_layout is 'BSN'"),
        ({"num_heads": 3}, "num_key_value_heads is 2"),
        ({"scale_value": 0.0}, "scale_value is 0.0"),
        ({"query": torch.zeros(2, 3, HEADS, DIM)}, "query is torch.float32"),
        ({"atten_mask": torch.zeros(2, 3, dtype=torch.bool)}, "atten_mask is shape (2, 3)"),
        ({"actual_seq_lengths_kv": [4]}, "actual_seq_lengths_kv[0] is 4"),
    ],
)
def test_prompt_refuses(change: dict[str, Any], words: str) -> None:
    query, key, value = batch(3, 3, torch.float16)
    given = {"query": query, "key": key, "value": value, "input_layout": "BSND"} | COMMON | change
    refusal(PROMPT, prompt, given, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": torch.zeros(2, 2, HEADS, DIM).half()}, "query is shape (2, 2, 4, 32)"),
        ({"input_layout": "TND"}, "input_layout is 'TND'"),
        ({"actual_seq_lengths": [10]}, "actual_seq_lengths[0] is 10"),
        ({"inner_precise": 2}, "inner_precise is 2"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32), "block_size": 8}, "block_size is 8"),
        ({"atten_mask": torch.zeros(2, 9)}, "atten_mask is torch.float32"),
    ],
)
def test_decode_refuses(change: dict[str, Any], words: str) -> None:
    query, key, value = batch(1, 9, torch.float16)
    given = {"query": query, "key": key, "value": value, "input_layout": "BSND"} | COMMON | change
    refusal(DECODE, decode, given, words)


@pytest.mark.parametrize("argument", ["padding_mask", "pse_shift", "quant_scale2"])
def test_both_say_what_is_left_out(argument: str) -> None:
    query, key, value = batch(1, 9, torch.float16)
    extra: dict[str, Any] = {argument: torch.zeros(1)}
    for name, function in ((PROMPT, prompt), (DECODE, decode)):
        with pytest.raises(UnsimulatedOperator, match=f"{name}: argument {argument}"):
            function(query, key, value, input_layout="BSND", **COMMON, **extra)
