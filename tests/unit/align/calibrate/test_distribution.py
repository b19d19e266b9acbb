"""Quantiles against numpy; the margin against tails whose quantiles are known."""

from __future__ import annotations

import numpy as np
import pytest

from align.calibrate.distribution import EXCEEDED, FEW, FEW_MARGIN, LEAST_MARGIN, Distribution, distribution_of


def made(values: list[float]) -> Distribution:
    return distribution_of(values, values, [f"w{index}" for index in range(len(values))])


def test_quantiles_are_of_what_differs() -> None:
    values = [0.0] * 5 + [float(value) for value in range(1, 102)]
    found = made(values)
    assert (found.count, found.zeros, found.largest, found.where) == (106, 5, 101.0, "w105")
    assert (found.median, found.q90, found.q99) == (51.0, 91.0, 100.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_limit_is_beyond_the_wanted_quantile_of_a_pareto_tail(seed: int) -> None:
    """The tail that the module assumes: its quantile is known."""
    exponent = 0.12
    values = np.random.default_rng(seed).pareto(1 / exponent, 2000) + 1
    wanted = EXCEEDED**-exponent
    assert wanted * 0.75 < made(values.tolist()).limit < wanted * 1.8


@pytest.mark.parametrize("seed", range(5))
def test_it_is_generous_for_sums_of_roundings(seed: int) -> None:
    """The norm of 64 independent errors: a chi with 64 degrees, which 1e-7 exceeds at 1.51 times its mean."""
    generator = np.random.default_rng(seed)
    values = np.linalg.norm(generator.normal(size=(3000, 64)), axis=1)
    assert 1.51 * 8 < made(values.tolist()).limit < 3 * 8


def test_few_numbers_say_nothing_about_a_tail() -> None:
    found = made([0.0] * 100 + [1.0 + at / 100 for at in range(FEW - 1)])
    assert (found.tail, found.margin) == (0.0, FEW_MARGIN)
    assert found.limit == pytest.approx(FEW_MARGIN * found.largest)


def test_equal_numbers_have_the_least_margin() -> None:
    assert made([2.0] * 100).limit == pytest.approx(2.0 * LEAST_MARGIN)


def test_what_was_always_equal_has_a_limit_of_zero() -> None:
    found = made([0.0] * 200)
    assert (found.largest, found.limit, found.zeros) == (0.0, 0.0, 200)


def test_a_run_that_is_not_clean_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite: w1"):
        made([1.0, float("nan")])
    with pytest.raises(ValueError, match="no numbers"):
        made([])
