from __future__ import annotations

from typing import Any

import pytest
import torch
from simnpu_ops_reference import FLOATS, assert_close, normal, refusal
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import grouped_matmul

Tensor = torch.Tensor
NAME = "npu::npu_grouped_matmul"
BIAS = {torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.float32}
COUNTS = [3, 0, 6, 1]
ROWS = 12
"""Two more rows than the groups take."""

LISTS: dict[int, Tensor] = {
    0: torch.tensor([3, 3, 9, 10]),
    1: torch.tensor(COUNTS),
    2: torch.tensor([[0, 3], [2, 6], [3, 1], [0, 0]]),
}


def expected(x: Tensor, matrices: list[Tensor], biases: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Row by row in float64, and the sum of the absolute values of what is added up."""
    exact = torch.zeros(ROWS, matrices[0].shape[1], dtype=torch.float64)
    size = torch.zeros_like(exact)
    groups = [group for group, count in enumerate(COUNTS) for _ in range(count)]
    for row, group in enumerate(groups):
        for column in range(exact.shape[1]):
            terms = x[row].double() * matrices[group][:, column].double()
            exact[row, column], size[row, column] = terms.sum(), terms.abs().sum()
        if biases is not None:
            exact[row] += biases[group].double()
            size[row] += biases[group].double().abs()
    return exact, size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_groups_are_within_rounding_of_float64(
    numerics: str, dtype: torch.dtype, kind: int, transposed: bool, biased: bool
) -> None:
    x = normal(ROWS, 48, dtype=dtype)
    weight = normal(4, 5, 48, dtype=dtype, seed=1).transpose(1, 2)
    if not transposed:
        weight = weight.contiguous()
    biases = [normal(5, dtype=BIAS[dtype], seed=10 + group) for group in range(4)] if biased else None
    (y,) = grouped_matmul.npu_grouped_matmul(
        [x], [weight], bias=biases, split_item=2, group_type=0, group_list_type=kind, group_list=LISTS[kind]
    )
    exact, size = expected(x, list(weight), biases)
    assert y.dtype == dtype
    assert y.shape == (ROWS, 5)
    if numerics == "native":
        assert_close(y, exact, size, 3, 50)
    else:
        assert_close(y, exact, exact, 1, 50, size)


def test_a_list_of_matrices_and_of_ints_is_the_same() -> None:
    x, weight = normal(ROWS, 16), normal(4, 16, 5, seed=1)
    options: dict[str, Any] = {"split_item": 3, "group_type": 0}
    (one,) = grouped_matmul.npu_grouped_matmul([x], [weight], group_list=LISTS[0], **options)
    (two,) = grouped_matmul.npu_grouped_matmul([x], list(weight), group_list=LISTS[0], **options)
    (three,) = grouped_matmul.npu_grouped_matmul_list([x], list(weight), group_list=LISTS[0].tolist(), **options)
    assert torch.equal(one, two)
    assert torch.equal(one, three)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": [torch.zeros(ROWS, 7)]}, "weight is shape (8, 5); accepted: 7 rows"),
        ({"x": [torch.zeros(ROWS, 8, dtype=torch.int8)]}, "x is torch.int8"),
        ({"x": [torch.zeros(ROWS, 8).half()]}, "weight is torch.float32"),
        ({"weight": [torch.zeros(4)]}, "weight is shape (4,)"),
        ({"weight": [torch.zeros(8, 5), torch.zeros(8, 6)]}, "weight is shape (8, 6); accepted: 5 columns"),
        ({"group_list": torch.tensor([3, 3, 9])}, "group_list is shape (3,)"),
        ({"group_list": torch.tensor(COUNTS, dtype=torch.int32)}, "group_list is torch.int32"),
        ({"group_list": torch.tensor([3, 2, 9, 10])}, "group_list is [3, 2, 9, 10]; accepted: cumulative"),
        ({"group_list": torch.tensor([3, 3, 9, 13])}, "at most 12 together"),
        ({"group_list": None}, "group_list is None"),
        ({"group_list_type": 3}, "group_list_type is 3"),
        ({"split_item": 4}, "split_item is 4"),
        ({"bias": [torch.zeros(5)] * 3}, "bias is for 3 groups"),
        ({"bias": [torch.zeros(4)] * 4}, "bias is shape (4,)"),
        ({"bias": [torch.zeros(5).half()] * 4}, "bias is torch.float16"),
    ],
)
def test_refuses(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"x": [torch.zeros(ROWS, 8)], "weight": [torch.zeros(4, 8, 5)], "group_list": LISTS[0]}
    refusal(NAME, grouped_matmul.npu_grouped_matmul, given | {"split_item": 2, "group_type": 0} | change, words)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": [torch.zeros(5)]},
        {"output_dtype": 1},
        {"split_item": 0},
        {"group_type": 2},
        {"act_type": 1},
        {"x": [torch.zeros(3, 8)] * 4},
    ],
)
def test_uses_that_are_left_out(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"x": [torch.zeros(ROWS, 8)], "weight": [torch.zeros(4, 8, 5)], "group_list": LISTS[0]}
    with pytest.raises(UnsimulatedOperator, match=NAME):
        grouped_matmul.npu_grouped_matmul(**given | {"split_item": 2, "group_type": 0} | change)
