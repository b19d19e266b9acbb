from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simnpu_ops_reference import HALVES, assert_attention_close, attention, normal, refusal
from torch_npu._sim.ops import atb_attention

Tensor = torch.Tensor
HEADS, KV, DIM, SIZE = 4, 2, 32, 16
SCALE = 1 / math.sqrt(DIM)
PREFILL = "atb::_npu_flash_attention"
UNPAD = "atb::_npu_flash_attention_unpad"
PAGED = "atb::_npu_paged_attention"


def packed(lengths: list[int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, HEADS, DIM], key and value [T, KV, DIM] of packed sequences."""
    tokens = sum(lengths)
    shapes = (HEADS, KV, KV)
    query, key, value = (normal(tokens, n, DIM, dtype=dtype, seed=seed + i) for i, n in enumerate(shapes))
    return query, key, value


def check_sequences(
    out: Tensor, lengths: list[int], given_tensors: tuple[Tensor, Tensor, Tensor], causal: bool, numerics: str
) -> None:
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        query, key, value = (one[here] for one in given_tensors)
        expected = attention(query, key, value, SCALE, lambda i, j: j <= i or not causal)
        assert_attention_close(out[here], expected, numerics, length, DIM)
        start += length


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("hidden", [1.0, -torch.inf, -20000.0])
@pytest.mark.parametrize("flat", [True, False])
def test_flash_attention_is_within_rounding_of_float64(
    numerics: str, dtype: torch.dtype, hidden: float, flat: bool
) -> None:
    lengths = [5, 1, 8]
    tensors = packed(lengths, dtype)
    mask = torch.zeros(9, 9, dtype=dtype).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), hidden)
    out = torch.empty_like(tensors[0])
    shaped = [one.flatten(1) if flat else one for one in (*tensors, out)]
    seq_len = torch.tensor(lengths, dtype=torch.int32)
    atb_attention._npu_flash_attention(*shaped[:3], mask, seq_len, SCALE, HEADS, KV, shaped[3])
    check_sequences(out, lengths, tensors, True, numerics)


@pytest.mark.parametrize("dtype", HALVES)
def test_flash_attention_unpad_sees_the_whole_sequence(numerics: str, dtype: torch.dtype) -> None:
    lengths = [3, 7]
    tensors = packed(lengths, dtype)
    out = torch.empty_like(tensors[0])
    seq_len = torch.tensor(lengths, dtype=torch.int32)
    atb_attention._npu_flash_attention_unpad(*tensors, seq_len, SCALE, HEADS, KV, out)
    check_sequences(out, lengths, tensors, False, numerics)


def test_any_mask_counts_not_only_a_causal_one(numerics: str) -> None:
    query, key, value = packed([4], torch.float16)
    mask = torch.zeros(4, 4, dtype=torch.float16)
    mask[2, 0] = mask[0, 3] = 1
    out = torch.empty_like(query)
    seq_len = torch.tensor([4], dtype=torch.int32)
    atb_attention._npu_flash_attention(query, key, value, mask, seq_len, SCALE, HEADS, KV, out)
    expected = attention(query, key, value, SCALE, lambda i, j: (i, j) not in ((2, 0), (0, 3)))
    assert_attention_close(out, expected, numerics, 4, DIM)


def test_the_output_may_be_the_memory_of_the_query(numerics: str) -> None:
    lengths = [3, 4]
    query, key, value = packed(lengths, torch.bfloat16)
    out, seq_len = torch.empty_like(query), torch.tensor(lengths, dtype=torch.int32)
    atb_attention._npu_flash_attention_unpad(query, key, value, seq_len, SCALE, HEADS, KV, out)
    atb_attention._npu_flash_attention_unpad(query, key, value, seq_len, SCALE, HEADS, KV, query)
    assert torch.equal(query, out)


def pages(lengths: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Caches [blocks, SIZE, KV, DIM] and a block table (ids not in order) for sequences of `lengths`."""
    width = max(-(-length // SIZE) for length in lengths)
    count = len(lengths) * width + 1
    keys, values = (normal(count, SIZE, KV, DIM, dtype=dtype, seed=seed) for seed in (5, 6))
    table = torch.arange(count - 1, 0, -1, dtype=torch.int32)[: len(lengths) * width].view(len(lengths), width)
    return keys, values, table


def rows_of(cache: Tensor, table: Tensor, index: int, length: int) -> Tensor:
    """Read the rows of one sequence token by token."""
    size = cache.shape[1]
    return torch.stack([cache[int(table[index, at // size]), at % size] for at in range(length)])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("flat", [True, False])
def test_paged_attention_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype, flat: bool) -> None:
    lengths = [1, 16, 37]
    keys, values, table = pages(lengths, dtype)
    query = normal(3, HEADS, DIM, dtype=dtype)
    out = torch.empty_like(query)
    shaped = [one.flatten(1) if flat else one for one in (query, out)]
    context = torch.tensor(lengths, dtype=torch.int32)
    atb_attention._npu_paged_attention(shaped[0], keys, values, KV, HEADS, SCALE, table, context, shaped[1])
    for index, length in enumerate(lengths):
        key, value = rows_of(keys, table, index, length), rows_of(values, table, index, length)
        expected = attention(query[index : index + 1], key, value, SCALE, lambda i, j: True)
        assert_attention_close(out[index : index + 1], expected, numerics, length, DIM)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_paged_equals_contiguous_attention(lengths: list[int]) -> None:
    keys, values, table = pages(lengths, torch.float16)
    query = normal(len(lengths), HEADS, DIM, dtype=torch.float16)
    out = torch.empty_like(query)
    context = torch.tensor(lengths, dtype=torch.int32)
    atb_attention._npu_paged_attention(query, keys, values, KV, HEADS, SCALE, table, context, out)
    for index, length in enumerate(lengths):
        key, value = rows_of(keys, table, index, length), rows_of(values, table, index, length)
        # The same query at every token of a packed sequence: without a mask each one sees all of it.
        repeated = query[index].expand(length, -1, -1).contiguous()
        whole, seq_len = torch.empty_like(repeated), torch.tensor([length], dtype=torch.int32)
        atb_attention._npu_flash_attention_unpad(repeated, key, value, seq_len, SCALE, HEADS, KV, whole)
        assert torch.allclose(whole[0].float(), out[index].float(), rtol=2e-3, atol=1e-6)


def test_padding_of_a_block_table_is_never_read(numerics: str) -> None:
    lengths = [20, 3]
    keys, values, table = pages(lengths, torch.float16)
    query, context = normal(2, HEADS, DIM, dtype=torch.float16), torch.tensor(lengths, dtype=torch.int32)
    out, padded_out = torch.empty_like(query), torch.empty_like(query)
    atb_attention._npu_paged_attention(query, keys, values, KV, HEADS, SCALE, table, context, out)
    padded = torch.full((4, 6), -1, dtype=torch.int32)
    padded[0, :2], padded[1, :1] = table[0, :2], table[1, :1]
    atb_attention._npu_paged_attention(query, keys, values, KV, HEADS, SCALE, padded, context, padded_out)
    assert torch.equal(out, padded_out)


def prefill_arguments() -> dict[str, Any]:
    query, key, value = packed([2, 3], torch.float16)
    return {
        "query": query,
        "key": key,
        "value": value,
        "seq_len": torch.tensor([2, 3], dtype=torch.int32),
        "scale_value": SCALE,
        "num_heads": HEADS,
        "num_kv_heads": KV,
        "out": torch.empty_like(query),
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_len": torch.tensor([2, 2], dtype=torch.int32)}, "seq_len is [2, 2], in sum 4"),
        ({"seq_len": torch.tensor([5, 0], dtype=torch.int32)}, "seq_len[1] is 0"),
        ({"seq_len": torch.tensor([2, 3])}, "seq_len is torch.int64"),
        ({"query": torch.zeros(5, HEADS, DIM)}, "query is torch.float32"),
        ({"num_heads": 3}, "num_kv_heads is 2"),
        ({"num_heads": 8}, "query is shape (5, 4, 32)"),
        ({"key": torch.zeros(4, KV, DIM).half()}, "key is shape (4, 2, 32)"),
        ({"value": torch.zeros(5, KV, DIM).bfloat16()}, "value is torch.bfloat16"),
        ({"scale_value": float("nan")}, "scale_value is nan"),
        ({"out": torch.zeros(5, HEADS, 16).half()}, "out is shape (5, 4, 16)"),
    ],
)
def test_prefills_refuse(change: dict[str, Any], words: str) -> None:
    given_arguments = prefill_arguments() | change
    mask = torch.ones(3, 3, dtype=torch.float16).triu(1)
    refusal(UNPAD, atb_attention._npu_flash_attention_unpad, given_arguments, words)
    refusal(PREFILL, atb_attention._npu_flash_attention, given_arguments | {"mask": mask}, words)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.zeros(2, 2).half(), "mask is shape (2, 2)"),
        (torch.zeros(3, 3), "mask is torch.float32"),
        (torch.zeros(1, 3, 3).half(), "mask is shape (1, 3, 3)"),
        (torch.full((3, 3), 0.5).half(), "mask is of other numbers"),
        (torch.full((3, 3), -1.0).half(), "mask is of other numbers"),
    ],
)
def test_flash_attention_refuses_masks(mask: Tensor, words: str) -> None:
    refusal(PREFILL, atb_attention._npu_flash_attention, prefill_arguments() | {"mask": mask}, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_lens": torch.tensor([17, 0], dtype=torch.int32)}, "context_lens[1] is 0"),
        ({"context_lens": torch.tensor([17, 9999], dtype=torch.int32)}, "context_lens[1] is 9999"),
        ({"context_lens": torch.tensor([33, 1], dtype=torch.int32)}, "block_table is 2 blocks of 16 wide"),
        ({"context_lens": torch.tensor([17], dtype=torch.int32)}, "context_lens is 1 long"),
        ({"context_lens": torch.tensor([17, 3])}, "context_lens is torch.int64"),
        ({"block_table": torch.tensor([[1, 5], [0, 0]], dtype=torch.int32)}, "block_table[0] is block 5"),
        ({"block_table": torch.tensor([[1, -1], [0, 0]], dtype=torch.int32)}, "block_table[0] is block -1"),
        ({"block_table": torch.tensor([[1, 2], [0, 0]])}, "block_table is torch.int64"),
        ({"block_table": torch.tensor([[1, 2]], dtype=torch.int32)}, "block_table is shape (1, 2)"),
        ({"key_cache": torch.zeros(5, 8, KV, DIM).half()}, "block size of key_cache is 8"),
        ({"key_cache": torch.zeros(5, 24, KV, DIM).half()}, "block size of key_cache is 24"),
        ({"value_cache": torch.zeros(4, SIZE, KV, DIM).half()}, "value_cache is shape (4, 16, 2, 32)"),
        ({"num_kv_heads": 1}, "key_cache is shape"),
        ({"out": torch.zeros(2, HEADS, DIM)}, "out is torch.float32"),
    ],
)
def test_paged_attention_refuses(change: dict[str, Any], words: str) -> None:
    keys, values, table = pages([17, 3], torch.float16)
    given_arguments = {
        "query": torch.zeros(2, HEADS, DIM).half(),
        "key_cache": keys,
        "value_cache": values,
        "num_kv_heads": KV,
        "num_heads": HEADS,
        "scale_value": SCALE,
        "block_table": table,
        "context_lens": torch.tensor([17, 3], dtype=torch.int32),
        "out": torch.empty(2, HEADS, DIM).half(),
    } | change
    refusal(PAGED, atb_attention._npu_paged_attention, given_arguments, words)
