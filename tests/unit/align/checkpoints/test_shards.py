"""Which part a rank holds: parts cover the whole, and copies stand where there are more ranks than elements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.checkpoints.shards import Shard, shards, split
from align.checkpoints.table import Structure

QWEN3 = Structure(
    tags=("all", "gqa", "dense", "qwen3"),
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=100,
    eps=1e-6,
    rope={},
    scale=0.25,
    tp=4,
)


@given(st.integers(1, 12), st.integers(1, 12))
def test_parts_cover_the_whole_in_the_order_of_the_ranks(each: int, tp: int) -> None:
    parts = [split(each * tp, tp, rank) for rank in range(tp)]
    held = [element for part in parts for element in range(part.start, part.start + part.count)]
    assert held == list(range(each * tp))
    assert all(part.total == each * tp for part in parts)


@given(st.integers(1, 6), st.integers(2, 6))
def test_more_ranks_than_elements_hold_copies_side_by_side(total: int, copies: int) -> None:
    tp = total * copies
    parts = [split(total, tp, rank) for rank in range(tp)]
    assert [part.start for part in parts] == sorted(list(range(total)) * copies)
    assert {(part.count, part.total) for part in parts} == {(1, total)}


@pytest.mark.parametrize(("total", "tp"), [(6, 4), (4, 6), (3, 2), (9, 6)])
def test_what_cannot_be_shared(total: int, tp: int) -> None:
    with pytest.raises(ValueError, match=f"{total} elements cannot be shared by {tp} ranks"):
        split(total, tp, 0)


def test_the_parts_of_a_rank_by_hand() -> None:
    held = shards(QWEN3, 2)
    assert set(held) == {
        *("attn.q", "attn.q_norm", "attn.q_rope", "attn.out"),
        *("attn.k", "attn.v", "attn.k_norm", "attn.k_rope", "attn.key_states", "attn.value_states"),
        *("mlp.gate", "mlp.up", "mlp.act"),
    }
    assert held["attn.q"] == Shard(4, 2, 8)
    assert held["attn.key_states"] == Shard(1, 1, 2), "ranks 2 and 3 share the second key head"
    assert held["mlp.act"] == Shard(48, 24, 96)


def test_one_rank_holds_everything() -> None:
    single = Structure(**{**QWEN3.__dict__, "tp": 1})
    assert shards(single, 0) == {}
