"""Blocks of one side that equal other blocks of the other side, under the noise that clean sides have."""

from __future__ import annotations

import pytest
import torch

from align.collectives.blocks import block_map, ratio_to, summed

GENERATOR = torch.Generator().manual_seed(5)
THEIRS = torch.randn(9, 4, 8, generator=GENERATOR)
NOISE = 0.01 * torch.randn(9, 4, 8, generator=GENERATOR)


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [0, 1, 0, 1], [2, 3, 0, 1]])
def test_another_order_of_the_heads_is_read_off(order: list[int]) -> None:
    found = block_map(THEIRS[:, order] + NOISE, THEIRS, 4)
    assert found is not None and found.fits
    assert list(found.order) == order and found.after < 0.02 < 0.5 < found.before


def test_heads_in_their_places_fit_no_other_order() -> None:
    found = block_map(THEIRS + NOISE, THEIRS, 4)
    assert found is not None and not found.fits and found.order == (0, 1, 2, 3)


def test_heads_that_are_like_no_other_do_not_fit() -> None:
    found = block_map(torch.randn(9, 4, 8, generator=GENERATOR), THEIRS, 4)
    assert found is not None and not found.fits


def test_what_cannot_be_divided_or_is_not_finite_is_not_judged() -> None:
    assert block_map(THEIRS, THEIRS, 3) is None
    assert block_map(THEIRS[:, :2], THEIRS, 2) is None
    assert block_map(THEIRS * torch.nan, THEIRS, 4) is None


def test_halves_of_a_vocabulary() -> None:
    logits = torch.randn(5, 32, generator=GENERATOR)
    found = block_map(torch.cat(logits.chunk(2, -1)[::-1], -1), logits, 2)
    assert found is not None and found.fits and found.order == (1, 0)


@pytest.mark.parametrize(("factor", "state"), [(2.0, "fits"), (1.0, "refuted"), (3.0, "refuted")])
def test_a_ratio_of_the_group_size(factor: float, state: str) -> None:
    found = ratio_to(factor * THEIRS + NOISE, THEIRS, 2)
    assert found.state == state and found.numbers["ratio"] == pytest.approx(factor, rel=0.01)


def test_parts_that_add_up_to_the_other_side() -> None:
    part = torch.randn(9, 4, 8, generator=GENERATOR)
    found = summed({0: part, 1: THEIRS - part + NOISE}, THEIRS)
    assert found.state == "fits" and found.residual is not None and found.residual < 0.02
    assert summed({0: part, 1: part}, THEIRS).state == "refuted"
    assert summed({0: part[:3], 1: part[:3]}, THEIRS).state == "not observable"
