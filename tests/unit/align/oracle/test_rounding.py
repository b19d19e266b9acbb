"""Rounding in one step, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.oracle.rounding import round_once

#: Bits of the significand, smallest exponent of a normal number.
FORMATS = {torch.bfloat16: (8, -126), torch.float16: (11, -14)}


def nearest(value: float, dtype: torch.dtype) -> float:
    """To nearest, ties to even, by fractions; small results only."""
    bits, lowest = FORMATS[dtype]
    exact = Fraction(value)
    if exact == 0:
        return 0.0
    exponent = math.frexp(value)[1] - 1
    unit = Fraction(2) ** (max(exponent, lowest) - bits + 1)
    return float(round(exact / unit) * unit)  # Fraction rounds half to even


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(FORMATS)),
    st.integers(-(2**12), 2**12),
    st.integers(-30, 2),
    st.integers(-3, 3),
    st.integers(20, 52),
)
def test_ties_and_near_ties(dtype: torch.dtype, whole: int, power: int, nudge: int, below: int) -> None:
    """Halves between two numbers of the target, and halves that are missed by less than float32 sees."""
    value = (whole + 0.5) * 2.0**power
    value += nudge * abs(value) * 2.0**-below
    found = float(round_once(torch.tensor([value], dtype=torch.float64), dtype)[0])
    assert found == nearest(value, dtype)


def test_two_roundings_would_be_wrong() -> None:
    value = torch.tensor([1 + 2**-8 + 2**-30], dtype=torch.float64)  # just above a tie of bfloat16
    assert float(value.bfloat16()[0]) == 1.0
    assert float(round_once(value, torch.bfloat16)[0]) == 1 + 2**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_not_finite_stays_so_and_halves_stay_themselves(dtype: torch.dtype) -> None:
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e300, -0.0], dtype=torch.float64)
    found = round_once(odd, dtype).double()
    assert found[:2].tolist() == [torch.inf, -torch.inf]
    assert bool(found[2].isnan())
    assert float(found[3]) == torch.inf
    assert float(found[4]) == 0
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if dtype != torch.float32:
        numbers = every.view(dtype)
        assert torch.equal(round_once(numbers.double(), dtype).nan_to_num(7.0), numbers.nan_to_num(7.0))
