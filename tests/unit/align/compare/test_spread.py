"""How a distance is spread over rows, steps, channels and heads, from tensors whose differences are known."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from align.compare.metrics import join, measure_block
from align.compare.rows import PairedRow, Place, RowKey
from align.compare.spread import NAMED, SHARES, spread_of


def rows(*steps: int) -> list[PairedRow]:
    return [
        PairedRow(RowKey("r", at, 0), "decode", Place(step, at, None), Place(9, at, None))
        for at, step in enumerate(steps)
    ]


def test_one_wrong_row_is_named_and_the_others_are_not() -> None:
    reference = torch.ones(4, 8)
    candidate = reference.clone()
    candidate[2] *= 1.5
    found = spread_of([measure_block(candidate, reference)], rows(0, 0, 1, 2))
    assert found is not None
    assert found.rows == (("r", 2, 0.5),)
    assert found.quantiles[0] == 0 and found.quantiles[-1] == 0.5 and len(found.quantiles) == len(SHARES)
    assert found.steps == ((0, 0.0), (1, 0.5), (2, 0.0))
    assert len(found.channels) == NAMED and found.heads == ()
    assert all(value == pytest.approx(0.25) for _, value in found.channels), "a quarter of its squares is off by half"


def test_heads_and_blocks_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    reference = torch.randn(6, 3, 4)
    candidate = reference.clone()
    candidate[:, 1] += 0.1 * reference[:, 1]
    at = [[0, 2, 4], [1, 3, 5]]
    blocks = [measure_block(candidate[part], reference[part]).at(part) for part in at]
    found, metrics = spread_of(blocks, rows(0, 1, 0, 1, 0, 1)), join(blocks)
    assert found is not None and metrics.worst_token is not None and metrics.worst_channel is not None
    ((head, value),) = found.heads
    assert head == 1 and value == pytest.approx(0.1, rel=1e-5)
    assert found.rows[0][1:] == (metrics.worst_token.index, metrics.worst_token.rel_l2)
    assert found.channels[0] == (metrics.worst_channel.index, metrics.worst_channel.rel_l2)
    for step, error in found.steps:
        part = candidate[step::2] - reference[step::2]
        assert error == pytest.approx(sqrt(float(part.square().sum() / reference[step::2].square().sum())))


def test_what_is_not_finite_and_what_has_no_distance() -> None:
    reference, candidate = torch.ones(2, 2), torch.tensor([[1.0, float("nan")], [1.0, 1.0]])
    found = spread_of([measure_block(candidate, reference)], rows(0, 1))
    assert found is not None
    assert found.to_dict()["rows"][0] == ["r", 0, "inf"]
    assert found.to_dict()["steps"] == [[0, "inf"], [1, 0.0]]
    integers = measure_block(torch.tensor([[1]]), torch.tensor([[2]]))
    assert spread_of([integers], rows(0)) is None
    assert spread_of([], []) is None
