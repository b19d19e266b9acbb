"""The noise policy: units in the last place, floor and cap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from align.compare.noise import MANY, NoisePolicy, ulp

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@given(magnitude=st.floats(0.01, 1000.0))
def test_ulp_is_the_distance_to_the_next_value(dtype: str, magnitude: float) -> None:
    # The value of the dtype at or below the magnitude, and its neighbour through the bit pattern.
    value = torch.tensor(magnitude, dtype=torch.float64).to(DTYPES[dtype])
    integer = {2: torch.int16, 4: torch.int32}[value.element_size()]
    if value.double() > magnitude:
        value = (value.view(integer) - 1).view(DTYPES[dtype])
    above = (value.view(integer) + 1).view(DTYPES[dtype])
    assert ulp(magnitude, dtype) == (above.double() - value.double()).item()


@pytest.mark.parametrize("magnitude", [0.0, -1.0, float("nan"), float("inf")])
def test_ulp_needs_a_magnitude(magnitude: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        ulp(magnitude, "bfloat16")


def test_hand_computed_policies() -> None:
    # bfloat16 has 8 significand bits: between 4 and 8 the ulp is 2**(2-7).
    assert NoisePolicy.for_dtype("bfloat16", 4) == NoisePolicy(floor=0.0625, cap=0.375)
    assert NoisePolicy.for_dtype("float16", 4) == NoisePolicy(floor=0.0625 / 8, cap=0.375 / 8)
    assert NoisePolicy.for_dtype("bfloat16", 16, logit_magnitude=16.0) == NoisePolicy(floor=0.25, cap=3.0)


def test_unknown_dtype_and_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="valid: bfloat16, float16, float32"):
        NoisePolicy.for_dtype("int8")
    with pytest.raises(ValueError, match="at least 1"):
        NoisePolicy.for_dtype("bfloat16", 0)


@pytest.mark.parametrize(("floor", "cap"), [(0.2, 0.1), (-0.1, 0.1), (0.1, float("inf")), (float("nan"), 1.0)])
def test_inconsistent_thresholds_are_refused(floor: float, cap: float) -> None:
    with pytest.raises(ValueError, match="floor <= cap"):
        NoisePolicy(floor, cap)


@given(measured=st.floats(0.0, 10.0))
def test_tolerance_stays_between_floor_and_cap(measured: float) -> None:
    policy = NoisePolicy(floor=0.1, cap=0.5)
    tolerance = policy.tolerance(measured)
    assert policy.floor <= tolerance <= policy.cap
    if measured > policy.cap:
        assert tolerance == policy.floor


@pytest.mark.parametrize(
    ("dtype", "peak", "floor"),
    [("bfloat16", 7.0, 0.0625), ("bfloat16", 20.0, 0.25), ("float16", 20.0, 0.03125), ("bfloat16", 0.0, 0.0625)],
)
def test_the_floor_follows_the_logits_that_were_seen(dtype: str, peak: float, floor: float) -> None:
    """Two units in the last place at the peak: in [16, 32) bfloat16 has steps of 1/8, float16 of 1/64."""
    policy = NoisePolicy.for_dtype(dtype, 30)
    assert policy.at(peak, dtype) == NoisePolicy(floor=floor, cap=policy.cap)


def test_the_cap_bounds_the_floor() -> None:
    policy = NoisePolicy.for_dtype("bfloat16", 4)
    assert policy.at(1e6, "bfloat16") == NoisePolicy(floor=policy.cap, cap=policy.cap)
    assert policy.at(float("nan"), "bfloat16") == policy


@pytest.mark.parametrize("samples", [12, 60, 500])
def test_the_largest_of_few_stands_for_that_of_many(samples: int) -> None:
    """Of normal errors; by brute force."""
    chance = np.random.default_rng(7)
    few = np.abs(chance.standard_normal((4000, samples))).max(1)
    many = np.abs(chance.standard_normal((400, MANY))).max(1)
    policy = NoisePolicy(floor=0.0, cap=1e9)
    reached = np.array([policy.tolerance(float(one), samples) for one in few])
    # Right on average: the extrapolation of one-sided maxima serves for absolute values nearly as well.
    assert np.mean(reached) == pytest.approx(np.mean(many), rel=0.25)
    assert np.mean(reached) > np.mean(few)


def test_extrapolation_has_bounds() -> None:
    policy = NoisePolicy(floor=0.1, cap=0.4)
    assert policy.tolerance(0.0, 5) == 0.1
    assert policy.tolerance(0.39, 20) == 0.4, "never beyond the cap"
    assert policy.tolerance(0.41, 20) == 0.1, "noise beyond the cap explains nothing"
    assert policy.tolerance(0.2) == policy.tolerance(0.2, MANY * 10) == 0.2
    assert policy.tolerance(0.2, 0) == policy.tolerance(0.2, 10) <= 0.4


def test_a_flip_that_a_clean_pair_showed_is_noise() -> None:
    """Seen with other weights: two right sides, one id off by 0.096 and the other by 0.06, 0.068 elsewhere."""
    tolerance = NoisePolicy.for_dtype("bfloat16", 4).tolerance(0.06826162338256836, 45)
    assert 2 * tolerance >= 0.09375 + 0.0625
    assert tolerance >= 0.0958
