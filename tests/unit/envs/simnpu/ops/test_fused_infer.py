from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simnpu_ops_reference import HALVES, assert_attention_close, assert_close, attention, normal
from torch_npu._sim.ops import fused_infer

Tensor = torch.Tensor
HEADS, KV, DIM, SIZE = 4, 2, 32, 16
SCALE = 1 / math.sqrt(DIM)
fia = fused_infer.npu_fused_infer_attention_score
fia_v2 = fused_infer.npu_fused_infer_attention_score_v2
COMMON: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": KV, "scale": SCALE}
TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)

Allowed = Callable[[int, int], bool]


def ends(lengths: list[int]) -> list[int]:
    return [sum(lengths[: index + 1]) for index in range(len(lengths))]


def rule(mode: int, tokens: int, span: int, before: int = 2, after: int = 1) -> Allowed:
    """What a query may look at in a sparse mode (2048 mask given), written from the documentation."""
    shift = span - tokens
    if mode == 2:
        return lambda i, j: j <= i
    if mode == 3:
        return lambda i, j: j <= i + shift
    if mode == 4:
        return lambda i, j: i + shift - before <= j <= i + shift + after
    return lambda i, j: True


def packed(queries: list[int], spans: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    query = normal(sum(queries), HEADS, DIM, dtype=dtype)
    key, value = (normal(sum(spans), KV, DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    return query, key, value


def to_pages(rows: Tensor, spans: list[int], heads_first: bool = False) -> tuple[Tensor, Tensor]:
    """Put packed rows [T, KV, DIM] into a cache with shuffled blocks, row by row; return (cache, block
    table).
    """
    width = max(1, max(-(-span // SIZE) for span in spans))
    blocks = len(spans) * width + 2
    cache = torch.full((blocks, SIZE, KV, DIM), torch.nan, dtype=rows.dtype)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(blocks)).tolist()
    table = torch.full((len(spans) + 1, width + 1), -7, dtype=torch.int32)
    start = 0
    for index, span in enumerate(spans):
        for at in range(span):
            if at % SIZE == 0:
                table[index, at // SIZE] = order.pop()
            cache[int(table[index, at // SIZE]), at % SIZE] = rows[start + at]
        start += span
    return (cache.transpose(1, 2).contiguous() if heads_first else cache.flatten(2)), table


def check_packed(
    output: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    queries: list[int],
    spans: list[int],
    mode: int,
    numerics: str,
) -> None:
    first, start = 0, 0
    for tokens, span in zip(queries, spans, strict=True):
        here, there = slice(first, first + tokens), slice(start, start + span)
        query, key, value = tensors[0][here], tensors[1][there], tensors[2][there]
        expected = attention(query, key, value, SCALE, rule(mode, tokens, span))
        assert_attention_close(output[here], expected, numerics, span, DIM)
        first, start = first + tokens, start + span


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", [0, 2, 3, 4])
@pytest.mark.parametrize("pages", [None, "blocks", "heads first"])
def test_tnd_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype, mode: int, pages: str | None) -> None:
    queries, spans = [3, 1, 5], [7, 20, 5]
    tensors = packed(queries, spans, dtype)
    options: dict[str, Any] = COMMON | {"input_layout": "TND", "sparse_mode": mode}
    options |= {"actual_seq_lengths": ends(queries), "atten_mask": TEMPLATE if mode else None}
    options |= {"pre_tokens": 2, "next_tokens": 1} if mode == 4 else {}
    if pages is None:
        output, _ = fia(*tensors, actual_seq_lengths_kv=ends(spans), **options)
    else:
        key, table = to_pages(tensors[1], spans, pages == "heads first")
        value, _ = to_pages(tensors[2], spans, pages == "heads first")
        paged = {"actual_seq_lengths_kv": spans, "block_table": table, "block_size": SIZE}
        output, _ = fia(tensors[0], key, value, **paged, **options)
    assert output.dtype == dtype
    check_packed(output, tensors, queries, spans, mode, numerics)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
def test_padded_layouts_are_within_rounding_of_float64(
    numerics: str, dtype: torch.dtype, layout: str, mode: int
) -> None:
    tokens, span = 4, 6
    query = normal(2, tokens, HEADS, DIM, dtype=dtype)
    key, value = (normal(2, span, KV, DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    full = torch.rand(2, 1, tokens, span, generator=torch.Generator().manual_seed(mode)) < 0.4
    mask = {0: None, 1: full}.get(mode, TEMPLATE)
    shaped = [arrange(one, layout) for one in (query, key, value)]
    options = {"atten_mask": mask, "sparse_mode": mode, "input_layout": layout}
    window = {"pre_tokens": 2, "next_tokens": 1} if mode == 4 else {}
    output, _ = fia(*shaped, **COMMON, **options, **window)
    outward = "BSND" if layout == "BNSD_BSND" else layout
    for index in range(2):
        allowed = rule(mode, tokens, span)
        if mode == 1:
            allowed = seen_by(full[index, 0])
        expected = attention(query[index], key[index], value[index], SCALE, allowed)
        assert_attention_close(restore(output, outward)[index], expected, numerics, span, DIM)


def seen_by(hidden: Tensor) -> Allowed:
    return lambda i, j: not bool(hidden[i, j])


def arrange(tensor: Tensor, layout: str) -> Tensor:
    """Bring [B, S, N, D] into a layout."""
    if layout == "BSH":
        return tensor.flatten(2)
    return tensor.transpose(1, 2).contiguous() if layout.startswith("BNSD") else tensor


def restore(tensor: Tensor, layout: str) -> Tensor:
    """Bring an output in a layout back to [B, S, HEADS, DIM]."""
    if layout == "BSH":
        return tensor.view(*tensor.shape[:2], HEADS, DIM)
    return tensor.transpose(1, 2) if layout == "BNSD" else tensor


@pytest.mark.parametrize("shape", [(3, 48), (3, 1, 48), (3, 1, 1, 48), (1, 48), (1, 1, 64)])
def test_a_single_query_takes_a_mask_row(numerics: str, shape: tuple[int, ...]) -> None:
    # The call of a paged prefill that turns every token into a sequence of its own.
    spans = [17, 3, 40]
    tensors = packed([1, 1, 1], spans, torch.float16)
    key, table = to_pages(tensors[1], spans)
    value, _ = to_pages(tensors[2], spans)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.3
    table = table[:3, :3].contiguous()
    output, _ = fia(
        tensors[0].view(3, 1, -1),
        key,
        value,
        atten_mask=mask,
        block_table=table,
        block_size=SIZE,
        actual_seq_lengths_kv=torch.tensor(spans, dtype=torch.int32),
        **COMMON,
    )
    start = 0
    for index, span in enumerate(spans):
        there = slice(start, start + span)
        row = mask.reshape(-1, shape[-1])[index if mask.reshape(-1, shape[-1]).shape[0] > 1 else 0]
        query = tensors[0][index : index + 1]
        expected = attention(query, tensors[1][there], tensors[2][there], SCALE, seen_by(row[None]))
        assert_attention_close(output[index].view(1, HEADS, DIM), expected, numerics, span, DIM)
        start += span


def test_a_full_mask_in_mode_0_meets_the_band(numerics: str) -> None:
    query, key, value = (
        normal(1, 4, HEADS, DIM).half(),
        normal(1, 6, KV, DIM).half(),
        normal(1, 6, KV, DIM).half(),
    )
    hidden = torch.zeros(1, 4, 6, dtype=torch.uint8)
    hidden[0, 1, 0] = 1
    window = {"pre_tokens": 1, "next_tokens": 2, "input_layout": "BSND"}
    output, _ = fia(query, key, value, atten_mask=hidden, **window, **COMMON)
    allowed: Allowed = lambda i, j: i - 1 <= j <= i + 2 and (i, j) != (1, 0)  # noqa: E731
    assert_attention_close(output[0], attention(query[0], key[0], value[0], SCALE, allowed), numerics, 6, DIM)


@pytest.mark.parametrize("dtype", HALVES)
def test_log_sum_exp(numerics: str, dtype: torch.dtype) -> None:
    queries, spans = [3, 2], [3, 1]
    tensors = packed(queries, spans, dtype)
    lengths = {"actual_seq_lengths": ends(queries), "actual_seq_lengths_kv": ends(spans)}
    options: dict[str, Any] = {**lengths, "input_layout": "TND"}
    options |= {"atten_mask": TEMPLATE, "sparse_mode": 3}
    output, total = fia(*tensors, softmax_lse_flag=True, **options, **COMMON)
    assert (total.shape, total.dtype) == ((5, HEADS, 1), torch.float32)
    steps = (2.1 if numerics == "native" else 0) * torch.finfo(dtype).eps / 2 / 2.0**-24
    for tokens, span, first, start in ((3, 3, 0, 0), (2, 1, 3, 3)):
        here, there = slice(first, first + tokens), slice(start, start + span)
        query, key, value = tensors[0][here], tensors[1][there], tensors[2][there]
        _, _, expected, largest = attention(query, key, value, SCALE, rule(3, tokens, span))
        found, seen = total[here, :, 0], torch.isfinite(expected)
        assert torch.equal(torch.isfinite(found), seen)
        assert_close(found[seen], expected[seen], 1 + largest[seen], 1, DIM + 16 + int(steps))
    # The first query of the second sequence has no key on its side of the diagonal.
    assert torch.equal(output[3], torch.zeros_like(output[3]))
    assert bool(torch.isposinf(total[3]).all())


def test_log_sum_exp_of_a_padded_batch_is_heads_first() -> None:
    query, key = normal(2, 3, HEADS, DIM).half(), normal(2, 3, KV, DIM).half()
    _, total = fia(query, key, key, softmax_lse_flag=True, input_layout="BSND", **COMMON)
    assert total.shape == (2, HEADS, 3, 1)
    expected = attention(query[1], key[1], key[1], SCALE, rule(0, 3, 3))[2]
    assert torch.allclose(total[1, :, :, 0].double().t(), expected, atol=1e-4)
    _, nothing = fia(query, key, key, input_layout="BSND", **COMMON)
    assert (nothing.tolist(), nothing.dtype) == ([0.0], torch.float32)


def test_lengths_of_a_padded_batch(numerics: str) -> None:
    query, key, value = (normal(2, 4, n, DIM, seed=i).half() for i, n in enumerate((HEADS, KV, KV)))
    lengths = {"actual_seq_lengths": [2, 4], "actual_seq_lengths_kv": [3]}
    output, _ = fia(query, key, value, input_layout="BSND", **lengths, **COMMON)
    for index, tokens in enumerate((2, 4)):
        expected = attention(query[index, :tokens], key[index, :3], value[index, :3], SCALE, rule(0, tokens, 3))
        assert_attention_close(output[index, :tokens], expected, numerics, 3, DIM)
    assert torch.equal(output[0, 2:], torch.zeros_like(output[0, 2:]))


def test_a_sequence_without_keys_gives_zeros(numerics: str) -> None:
    query, key, _ = packed([2, 1], [0, 3], torch.float16)
    lengths = {"actual_seq_lengths": [2, 3], "actual_seq_lengths_kv": [0, 3]}
    output, _ = fia(query, key, key, input_layout="TND", **lengths, **COMMON)
    assert torch.equal(output[:2], torch.zeros_like(output[:2]))
    assert output[2].abs().sum() > 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_layouts_and_pages_agree(sequences: list[tuple[int, int]]) -> None:
    queries, spans = [new for new, _ in sequences], [new + old for new, old in sequences]
    tensors = packed(queries, spans, torch.float16)
    causal = COMMON | {"atten_mask": TEMPLATE, "sparse_mode": 3}
    lengths = {"actual_seq_lengths": ends(queries), "actual_seq_lengths_kv": ends(spans)}
    output, _ = fia(*tensors, input_layout="TND", **lengths, **causal)
    key, table = to_pages(tensors[1], spans)
    value, _ = to_pages(tensors[2], spans)
    paged: dict[str, Any] = {"block_table": table, "block_size": SIZE, "actual_seq_lengths_kv": spans}
    from_pages, _ = fia(tensors[0], key, value, input_layout="TND", actual_seq_lengths=ends(queries), **paged, **causal)
    assert torch.equal(output, from_pages)
    first, start = 0, 0
    for new, span in zip(queries, spans, strict=True):
        here, there = slice(first, first + new), slice(start, start + span)
        one = [tensors[0][None, here], tensors[1][None, there], tensors[2][None, there]]
        single, _ = fia(*(part.flatten(2) for part in one), input_layout="BSH", **(causal if new > 1 else COMMON))
        assert torch.allclose(single.view(new, HEADS, DIM).float(), output[here].float(), rtol=2e-3, atol=1e-5)
        first, start = first + new, start + span


@pytest.mark.parametrize("dtype", HALVES)
def test_v2_with_a_sink_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype) -> None:
    queries, spans = [3, 2], [5, 2]
    tensors, sink = packed(queries, spans, dtype), normal(HEADS, dtype=dtype, seed=9)
    output, total = fia_v2(
        *tensors,
        actual_seq_qlen=torch.tensor(ends(queries), dtype=torch.int32),
        actual_seq_kvlen=ends(spans),
        learnable_sink=sink,
        num_query_heads=HEADS,
        num_key_value_heads=KV,
        softmax_scale=SCALE,
        input_layout="TND",
        atten_mask=TEMPLATE,
        sparse_mode=3,
        return_softmax_lse=True,
    )
    first, start = 0, 0
    for tokens, span in zip(queries, spans, strict=True):
        here, there = slice(first, first + tokens), slice(start, start + span)
        query, key, value = tensors[0][here], tensors[1][there], tensors[2][there]
        expected = attention(query, key, value, SCALE, rule(3, tokens, span), sink)
        assert_attention_close(output[here], expected, numerics, span, DIM)
        assert torch.allclose(total[here, :, 0].double(), expected[2], atol=0.05)
        first, start = first + tokens, start + span


def test_v2_without_a_sink_equals_v1(numerics: str) -> None:
    tensors = packed([3, 2], [5, 2], torch.bfloat16)
    options = {
        "atten_mask": TEMPLATE,
        "sparse_mode": 4,
        "pre_tokens": 1,
        "next_tokens": 0,
        "input_layout": "TND",
    }
    first, _ = fia(*tensors, actual_seq_lengths=[3, 5], actual_seq_lengths_kv=[5, 7], **options, **COMMON)
    names = {"num_query_heads": HEADS, "num_key_value_heads": KV, "softmax_scale": SCALE}
    second, _ = fia_v2(*tensors, actual_seq_qlen=[3, 5], actual_seq_kvlen=[5, 7], **options, **names)
    assert torch.equal(first, second)
