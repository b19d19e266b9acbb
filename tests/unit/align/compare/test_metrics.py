"""Distances between tensors, against float64 and brute force."""

from __future__ import annotations

import json
from math import inf, isnan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.compare.bits import same_bits
from align.compare.metrics import SLICE_FLOOR, Metrics, identical, join, measure, measure_block

SHAPES = [(5,), (1, 7), (300, 17), (4, 3, 8), (70, 4, 300)]


def pair(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(shape, generator=generator)
    return (reference + 0.01 * torch.randn(shape, generator=generator)).to(dtype), reference.to(dtype)


def known(value: float | None) -> float:
    assert value is not None
    return value


def slices(err: np.ndarray, ref: np.ndarray) -> tuple[int, float]:
    """Worst slice of squares summed over it, brute force: the smallest denominator is half the median norm."""
    below = np.maximum(np.sqrt(ref), SLICE_FLOOR * np.sqrt(np.median(ref)))
    relative = np.sqrt(err) / below
    return int(relative.argmax()), float(relative.max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = pair(shape, dtype)
    found = measure(a, b)
    x, y = a.double().numpy(), b.double().numpy()
    assert not found.equal
    assert found.max_abs == pytest.approx(np.abs(x - y).max(), rel=1e-5)
    assert found.max_rel == pytest.approx((np.abs(x - y) / np.maximum(np.abs(y), 1e-8)).max(), rel=1e-5)
    assert found.rel_l2 == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-5)
    cosine = (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)
    assert found.cosine == pytest.approx(cosine, rel=1e-6)
    assert found.elements == x.size and found.nonfinite == 0
    err, ref = (x - y) ** 2, y**2
    for axis, worst in ((0, found.worst_token), (1, found.worst_channel), (2, found.worst_head)):
        if axis == 2 and len(shape) != 3:
            assert worst is None
            continue
        view = {0: (shape[0], -1), 1: (shape[0], -1), 2: (shape[0], shape[1] if len(shape) == 3 else 1, -1)}[axis]
        over: int | tuple[int, int] = (1, 0, (0, 2))[axis]
        index, rel_l2 = slices(err.reshape(view).sum(over), ref.reshape(view).sum(over))
        assert worst is not None and worst.index == index
        assert worst.rel_l2 == pytest.approx(rel_l2, rel=1e-5)


def test_max_rel_is_the_seeds_formula() -> None:
    a, b = pair((33, 65), torch.bfloat16)
    x, y = a.float(), b.float()
    assert measure(a, b).max_rel == ((x - y).abs() / y.abs().clamp(min=1e-8)).max().item()


def test_a_local_fault_is_found_where_it_is() -> None:
    a, b = (torch.ones(64, 4, 8) for _ in range(2))
    a[37, 2, 5] += 0.5
    found = measure(a, b)
    assert known(found.rel_l2) == pytest.approx(0.5 / np.sqrt(64 * 32))
    assert found.worst_token is not None and found.worst_token.index == 37
    assert found.worst_channel is not None and found.worst_channel.index == 2 * 8 + 5
    assert found.worst_head is not None and found.worst_head.index == 2


def test_a_slice_near_zero_has_the_noise_of_the_others() -> None:
    b = torch.ones(9, 4)
    b[3] = 1e-6
    a = b + 0.01
    found = measure(a, b)
    assert found.worst_token is not None and found.worst_token.index == 3
    assert found.worst_token.rel_l2 == pytest.approx(0.01 / SLICE_FLOOR, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_tensors(dtype: torch.dtype) -> None:
    b = pair((40, 3), dtype)[1]
    for found in (measure(b.clone(), b), join([measure_block(b.clone(), b)])):
        assert found.equal
        assert (found.max_abs, found.max_rel, found.rel_l2, found.cosine) == (0.0, 0.0, 0.0, 1.0)


def test_nan_at_the_same_place_is_equal_and_counted() -> None:
    b = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    for found in (measure(b.clone(), b), join([measure_block(b.clone(), b)])):
        assert found.equal and found.nonfinite == 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_on_one_side_is_an_infinite_error(bad: float, side: int) -> None:
    tensors = [torch.ones(3, 4), torch.ones(3, 4)]
    tensors[side][1, 2] = bad
    found = measure(*tensors)
    assert not found.equal and found.max_abs == inf and found.rel_l2 == inf and found.nonfinite == 1
    assert found.worst_token is not None and found.worst_token.index == 1
    json.dumps(found.to_dict(), allow_nan=False)


def test_opposite_infinities_differ() -> None:
    assert measure(torch.tensor([torch.inf]), torch.tensor([-torch.inf])).max_abs == inf


def test_negative_zero_is_zero() -> None:
    a, b = torch.tensor([[-0.0, 1.0]]), torch.tensor([[0.0, 1.0]])
    assert not same_bits(a, b)
    assert measure(a, b).equal and torch.equal(a, b)


def test_a_zero_reference() -> None:
    found = measure(torch.ones(2, 2), torch.zeros(2, 2))
    assert found.rel_l2 == inf and isnan(known(found.cosine))
    assert measure(torch.zeros(2, 2), torch.zeros(2, 2)).rel_l2 == 0.0


def test_integers_name_their_rows() -> None:
    b = torch.arange(24).reshape(12, 2)
    a = b.clone()
    a[5, 1] += 1
    a[9] = 0
    found = measure(a, b)
    assert (found.equal, found.rows, found.rows_total, found.rel_l2) == (False, (5, 9), 2, None)
    assert measure(b.clone(), b).equal
    assert measure(b.int(), b).equal  # another width of the same ids


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), "shapes differ"),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), "dtypes differ in kind"),
        (torch.tensor(1.0), torch.tensor(2.0), "row axis"),
    ],
)
def test_what_cannot_be_measured(a: torch.Tensor, b: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        measure(a, b)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(0, 1000))
def test_blocks_add_up(owners: list[int], seed: int) -> None:
    a, b = pair((len(owners), 2, 5), torch.bfloat16, seed)
    places = [[row for row, owner in enumerate(owners) if owner == block] for block in sorted(set(owners))]
    parts = join([measure_block(a[rows], b[rows]).at(rows) for rows in places])
    whole = measure(a, b)
    assert parts.worst_token is not None and whole.worst_token is not None
    assert parts.worst_token.index == whole.worst_token.index
    assert close(parts) == pytest.approx(close(whole), rel=1e-6)


def close(found: Metrics) -> list[float]:
    worst = [known(one.rel_l2 if one else None) for one in (found.worst_token, found.worst_channel, found.worst_head)]
    return [known(found.rel_l2), known(found.max_abs), known(found.max_rel), known(found.cosine), *worst]


def test_no_rows() -> None:
    found = measure(torch.ones(0, 4), torch.ones(0, 4))
    assert found.equal and found.elements == 0 and found.worst_token is None


def test_identical_is_what_measure_says() -> None:
    b = pair((6, 2, 4), torch.bfloat16)[1]
    assert identical(b) == measure(b, b.clone())
