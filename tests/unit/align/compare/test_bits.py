"""Bits against torch's own answers."""

from __future__ import annotations

import pytest
import torch

from align.compare.bits import count_nonfinite, same_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (3,), (7, 5), (300, 1000)])
def test_nonfinite(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert count_nonfinite(values) == 0
    flat = values.view(-1)
    for index, bad in zip(range(0, flat.numel(), 3), [torch.nan, torch.inf, -torch.inf] * 10, strict=False):
        flat[index] = bad
    assert count_nonfinite(values) == values.numel() - int(torch.isfinite(values).sum())


def test_extremes_are_finite() -> None:
    for dtype in DTYPES:
        limits = torch.finfo(dtype)
        assert count_nonfinite(torch.tensor([limits.max, limits.min, limits.tiny, 0.0], dtype=dtype)) == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 1001])
def test_same_bits(dtype: torch.dtype, count: int) -> None:
    values = torch.randn(count + 1, generator=torch.Generator().manual_seed(1)).to(dtype)[1:]  # not aligned to 8 bytes
    assert same_bits(values, values.clone())
    if count:
        other = values.clone()
        other[-1] = not bool(other[-1]) if dtype == torch.bool else other[-1] + 1
        assert not same_bits(values, other)


def test_what_is_not_the_same() -> None:
    ones = torch.ones(4, 2)
    assert not same_bits(ones, torch.ones(2, 4)) and not same_bits(ones, ones.half())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(ones.T.contiguous().T, ones)  # strides are no bits
