"""Checksums of rows: of bits, not of places."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.ledger.record.checksum import _weights, cache_sums, row_sums

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 20).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_it_is_the_sum_of_words_times_weights(dtype: torch.dtype, dim: int) -> None:
    """Against Python integers, which do not wrap."""
    values = rows(dtype, 5, 2, dim)
    weights = _weights(-(-2 * dim * values.element_size() // 4)).tolist()
    for row, found in zip(values, row_sums(values).tolist(), strict=True):
        octets = row.contiguous().view(torch.uint8).numpy().tobytes()
        words = np.frombuffer(octets + bytes(-len(octets) % 4), dtype="<i4").tolist()
        assert found % (1 << 64) == sum(a * w for a, w in zip(words, weights, strict=True)) % (1 << 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    values = rows(dtype, 24, 2, 8)
    sums = row_sums(values)
    assert row_sums(values.transpose(0, 1).contiguous().transpose(0, 1)).equal(sums)
    wide = torch.zeros((24, 2, 16), dtype=dtype)
    wide[..., ::2] = values
    assert row_sums(wide[..., ::2]).equal(sums)
    for size in (1, 3, 8):
        cache = torch.zeros((30 // size + 1, size, 2, 8), dtype=dtype)
        slots = torch.randperm(24) + 2
        cache.view(torch.uint8).view(-1, 16 * dtype.itemsize)[slots] = values.view(torch.uint8).view(24, -1)
        assert row_sums(cache[slots // size, slots % size]).equal(sums)
        assert cache_sums(cache, slots).equal(sums)


def test_it_is_bitwise() -> None:
    values = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [float("nan"), 1.0], [float("nan"), 1.0], [0.0, 0.0]])
    sums = row_sums(values.bfloat16()[:, None]).tolist()
    assert len(set(sums)) == 4 and sums[2] == sums[3] and sums[4] == 0
    assert row_sums(torch.zeros((0, 2, 4))).shape == (0,) and row_sums(torch.zeros((3, 0, 4))).tolist() == [0, 0, 0]


def test_heads_and_channels_in_another_order_differ() -> None:
    values = rows(torch.bfloat16, 50, 4, 8)
    for other in (values.flip(1), values.flip(2), values.roll(1, 2)):
        assert not (row_sums(other) == row_sums(values)).any()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 127), st.integers(0, 15))
def test_any_single_bit_is_seen(channel: int, bit: int) -> None:
    values = rows(torch.bfloat16, 1, 4, 32)
    changed = values.clone().view(torch.int16).view(-1)
    changed[channel] ^= -(1 << bit) if bit == 15 else 1 << bit
    assert row_sums(changed.view(torch.bfloat16).view(1, 4, 32)) != row_sums(values)


def test_many_rows_do_not_collide() -> None:
    values = torch.arange(1 << 17, dtype=torch.int32).view(-1, 1, 1).repeat(1, 1, 4)
    assert row_sums(values).unique().numel() == 1 << 17


def test_a_slot_outside_the_cache_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        cache_sums(rows(torch.bfloat16, 2, 4, 2, 8), torch.tensor([8]))
