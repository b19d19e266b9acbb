"""The sum of what ranks made of a layer of experts, and what explains another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from align.collectives.expert_sums import sums_tried
from align.collectives.hypotheses import Tried, first_fit
from align.compare.expert_sum import ExpertParts

Tensor = torch.Tensor
ROWS, HIDDEN = 6, 64


def value(seed: int) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


ROUTED, SHARED = (value(1), value(2)), (value(3), value(4))
BESIDE = ExpertParts(dict(enumerate(ROUTED)), dict(enumerate(SHARED)), whole=False, gated=True)
ALONE = ExpertParts(dict(enumerate(ROUTED)), {}, whole=False, gated=False)
#: After an exchange of tokens each rank holds all of the routed result.
WHOLE = ExpertParts(dict.fromkeys((0, 1), ROUTED[0] + ROUTED[1]), dict(enumerate(SHARED)), whole=True, gated=True)
R, S = ROUTED[0] + ROUTED[1], SHARED[0] + SHARED[1]


def everywhere(one: Tensor) -> dict[int, Tensor]:
    return dict.fromkeys((0, 1), one.bfloat16())


def fit(parts: ExpertParts, results: Mapping[int, Tensor]) -> Tried | None:
    return first_fit(sums_tried(parts, results))


def test_the_sum_is_the_routed_and_the_shared_parts_of_all_ranks() -> None:
    assert torch.equal(BESIDE.expected.total, R + S)
    assert torch.equal(ALONE.expected.total, R) and ALONE.expected.roundings == 1
    assert torch.equal(WHOLE.expected.total, R + S) and WHOLE.expected.roundings == 4
    size = sum(one.abs() for one in (*ROUTED, *SHARED))
    assert torch.allclose(BESIDE.expected.size, torch.as_tensor(size))


@pytest.mark.parametrize(("parts", "total"), [(BESIDE, R + S), (ALONE, R), (WHOLE, R + S)])
def test_what_is_right_is_not_explained(parts: ExpertParts, total: Tensor) -> None:
    assert sums_tried(parts, everywhere(total)) == ()


@pytest.mark.parametrize(
    ("parts", "results", "name", "part"),
    [
        (BESIDE, lambda: {rank: (ROUTED[rank] + SHARED[rank]).bfloat16() for rank in (0, 1)}, "missing_reduce", None),
        (WHOLE, lambda: {rank: (R + SHARED[rank]).bfloat16() for rank in (0, 1)}, "missing_reduce", None),
        (BESIDE, lambda: everywhere(R + 2 * S), "doubled_reduce", "shared"),
        (WHOLE, lambda: everywhere(2 * R + S), "doubled_reduce", "routed"),
        (BESIDE, lambda: everywhere(2 * R + 2 * S), "doubled_reduce", "both"),
        (ALONE, lambda: everywhere(2 * R), "doubled_reduce", "both"),
        (BESIDE, lambda: everywhere(R), "collective", "shared"),
        (BESIDE, lambda: everywhere(S), "collective", "routed"),
    ],
)
def test_another_sum_is_explained(
    parts: ExpertParts, results: Callable[[], dict[int, Tensor]], name: str, part: str | None
) -> None:
    found = fit(parts, results())
    assert found is not None and (found.name, found.ranks) == (name, (0, 1))
    assert found.numbers.get("part") == part
    if name == "doubled_reduce":
        assert found.numbers["ratio"] == pytest.approx(2, rel=0.01) and found.numbers["size"] == 2


def test_what_is_no_factor_of_a_part_is_refuted() -> None:
    tried = sums_tried(BESIDE, everywhere(R.roll(1, 0) + S))
    assert tried and {one.state for one in tried} == {"refuted"}
    assert {one.state for one in sums_tried(BESIDE, everywhere(R + 1.3 * S))} == {"refuted"}
