from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simnpu_ops_reference import normal
from torch_npu._sim import attention_core

limits = st.one_of(st.none(), st.integers(-2, 8))


@given(st.integers(1, 6), st.integers(1, 8), limits, limits, st.integers(-4, 6))
@settings(max_examples=200, deadline=None)
def test_a_band_masks_what_lies_outside(
    tokens: int, span: int, before: int | None, after: int | None, offset: int
) -> None:
    masked = attention_core.band(tokens, span, before, after, offset)
    for query in range(tokens):
        for key in range(span):
            distance = key - (query + offset)
            outside = (after is not None and distance > after) or (before is not None and -distance > before)
            assert outside == (masked is not None and bool(masked[query, key]))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_pages_hold_what_a_packed_tensor_holds(lengths: list[int], heads_first: bool, random: Random) -> None:
    rows = normal(sum(lengths), 2, 4)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    packed = attention_core.Packed(rows, ends)
    counts = [-(-length // 16) for length in lengths]
    order = list(range(sum(counts) + 2))
    random.shuffle(order)
    cache = torch.full((len(order), 16, 2, 4), torch.nan)
    blocks: list[list[int]] = []
    for index, count in enumerate(counts):
        blocks.append([order.pop() for _ in range(count)])
        for at, row in enumerate(packed[index]):
            cache[blocks[-1][at // 16], at % 16] = row
    stored = cache.transpose(1, 2).contiguous() if heads_first else cache
    paged = attention_core.Paged(stored, blocks, lengths, heads_first)
    for index in range(len(lengths)):
        assert torch.equal(paged[index], packed[index])


def test_a_query_that_sees_nothing_gets_zeros_and_infinity(numerics: str) -> None:
    query, key = normal(2, 4, 16), normal(3, 2, 16, seed=1)
    masked = torch.tensor([[True, True, True], [False, True, True]])
    output, total = attention_core.attend(query, key, key, 0.25, masked, want_total=True)
    assert total is not None
    assert torch.equal(output[0], torch.zeros(4, 16))
    assert bool(torch.isposinf(total[0]).all())
    assert torch.allclose(output[1], key[0].repeat_interleave(2, 0))
    assert bool(torch.isfinite(total[1]).all())


def test_no_keys_give_zeros(numerics: str) -> None:
    output, total = attention_core.attend(normal(2, 4, 16), *(torch.zeros(0, 2, 16),) * 2, 0.25, want_total=True)
    assert total is not None
    assert torch.equal(output, torch.zeros(2, 4, 16))
    assert bool(torch.isposinf(total).all())
