from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simnpu_ops_reference import FLOATS, normal, refusal
from torch_npu._sim.ops import vocab

MASKED = "_C_ascend::get_masked_input_and_mask"
TOP = "npu::npu_top_k_top_p"


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_id_is_held_by_one_shard(data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 4))
    original, added = shards * data.draw(st.integers(1, 5)), shards * data.draw(st.integers(0, 3))
    padding = data.draw(st.integers(0, 3))
    ids = torch.arange(original + added)
    held = torch.zeros_like(ids)
    for shard in range(shards):
        rows, outside = vocab.get_masked_input_and_mask(
            ids,
            shard * original // shards,
            (shard + 1) * original // shards,
            padding,
            original + shard * added // shards,
            original + (shard + 1) * added // shards,
        )
        for token in ids.tolist():
            first, last = shard * original // shards, (shard + 1) * original // shards
            start, end = original + shard * added // shards, original + (shard + 1) * added // shards
            if first <= token < last:
                wanted = token - first
            elif start <= token < end:
                wanted = last - first + padding + token - start
            else:
                wanted = 0
            assert rows[token] == wanted
            assert bool(outside[token]) is not (first <= token < last or start <= token < end)
        held += ~outside
    assert bool((held == 1).all())


def test_rows_keep_dtype_and_shape() -> None:
    ids = torch.tensor([[3, 4], [9, 0]], dtype=torch.int32)
    rows, outside = vocab.get_masked_input_and_mask(ids, 2, 5, 0, 9, 9)
    assert (rows.dtype, outside.dtype, rows.shape) == (torch.int32, torch.bool, (2, 2))
    assert rows.tolist() == [[1, 2], [0, 0]]
    assert outside.tolist() == [[False, False], [True, True]]


def keep(row: list[float], k: int | None, p: float | None) -> list[bool]:
    """Which numbers a row keeps, in Python floats (float64)."""
    ascending = sorted(range(len(row)), key=lambda at: row[at])
    least = -math.inf if k is None else sorted(row)[len(row) - k]
    kept = [value >= least for value in row]
    if p is not None:
        total = sum(math.exp(value) for value, one in zip(row, kept, strict=True) if one)
        below = 0.0
        for at in ascending[:-1]:
            below += math.exp(row[at]) / total if kept[at] else 0.0
            if below <= 1 - p:
                kept[at] = False
    return kept


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("with_k", "with_p"), [(True, True), (True, False), (False, True), (False, False)])
def test_top_k_top_p_keeps_what_the_definition_keeps(dtype: torch.dtype, with_k: bool, with_p: bool) -> None:
    logits = (2 * normal(4, 50, dtype=torch.float32)).to(dtype)
    k = torch.tensor([1, 5, 50, 20], dtype=torch.int32) if with_k else None
    p = torch.tensor([0.5, 0.97, 0.71, 0.0]).to(dtype) if with_p else None
    filtered = vocab.npu_top_k_top_p(logits, p, k)
    assert filtered.dtype == dtype
    for index in range(4):
        row = [float(one) for one in logits[index]]
        kept = keep(row, int(k[index]) if k is not None else None, float(p[index]) if p is not None else None)
        expected = [value if one else -math.inf for value, one in zip(row, kept, strict=True)]
        assert filtered[index].double().tolist() == expected
        assert any(kept)


def test_a_cumulated_probability_of_just_1_minus_p_is_dropped() -> None:
    # Four equal probabilities: from below 0.25, 0.5, 0.75, 1, all exact.
    filtered = vocab.npu_top_k_top_p(torch.zeros(1, 4), torch.tensor([0.5]))
    assert torch.isfinite(filtered).sum() == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.tensor([1.0])}, "input is torch.float32"),
        ({"org_vocab_start_index": 6}, "org_vocab_start_index, org_vocab_end_index is 6, 5"),
        ({"added_vocab_start_index": -1}, "added_vocab_start_index, added_vocab_end_index is -1, 9"),
        ({"num_org_vocab_padding": -1}, "num_org_vocab_padding is -1"),
    ],
)
def test_masked_input_refuses(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "input": torch.tensor([1, 2]),
        "org_vocab_start_index": 0,
        "org_vocab_end_index": 5,
        "num_org_vocab_padding": 0,
        "added_vocab_start_index": 9,
        "added_vocab_end_index": 9,
    }
    refusal(MASKED, vocab.get_masked_input_and_mask, arguments | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.tensor([0, 1], dtype=torch.int32)}, "k is [0, 1]"),
        ({"k": torch.tensor([1, 9], dtype=torch.int32)}, "k is [1, 9]"),
        ({"k": torch.tensor([1, 2])}, "k is torch.int64"),
        ({"p": torch.tensor([0.5, 1.5])}, "p is [0.5, 1.5]"),
        ({"p": torch.tensor([0.5])}, "p is shape (1,)"),
        ({"p": torch.tensor([0.5, 0.5]).half()}, "p is torch.float16"),
        ({"logits": torch.zeros(8)}, "logits is shape (8,)"),
    ],
)
def test_top_k_top_p_refuses(change: dict[str, Any], words: str) -> None:
    refusal(TOP, vocab.npu_top_k_top_p, {"logits": torch.zeros(2, 8), "p": None, "k": None} | change, words)
