from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simnpu_ops_reference import FLOATS, HALVES, assert_close, normal, refusal
from torch_npu._sim.ops import moe_gating

Tensor = torch.Tensor
GATING = "npu::npu_moe_gating_top_k"
SOFTMAX = "npu::npu_moe_gating_top_k_softmax"


def softmax64(row: list[float]) -> list[float]:
    peak = max(row)
    powers = [math.exp(one - peak) for one in row]
    return [one / sum(powers) for one in powers]


def best(scores: list[float], k: int) -> list[int]:
    """Experts of the k largest scores, falling, the lower number first."""
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[:k]


def chosen64(
    row: list[float], bias: list[float], k: int, groups: int, kept: int, mode: int, sigmoid: bool, renorm: bool
) -> tuple[list[int], list[float]]:
    """What a router chooses for one token, in float64."""
    scores = [1 / (1 + math.exp(-one)) for one in row] if sigmoid else softmax64(row)
    ranked = [score + one for score, one in zip(scores, bias, strict=True)]
    size = len(row) // groups
    if groups > 1:
        parts = [sorted(ranked[at * size : (at + 1) * size], reverse=True) for at in range(groups)]
        values = [part[0] if mode == 0 else part[0] + part[1] for part in parts]
        stay = best(values, kept)
        ranked = [one if expert // size in stay else -math.inf for expert, one in enumerate(ranked)]
    experts = best(ranked, k)
    weights = [scores[expert] for expert in experts]
    if sigmoid or renorm:
        weights = [one / (sum(weights) + 1e-20) for one in weights]
    return experts, weights


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_weights_are_within_rounding_of_float64(numerics: str, dtype: torch.dtype) -> None:
    x = 2 * normal(9, 16, dtype=dtype)
    weights, experts, rows = moe_gating.npu_moe_gating_top_k_softmax(x, None, 4)
    assert (weights.dtype, experts.dtype, rows.dtype) == (dtype, torch.int32, torch.int32)
    every = torch.tensor([softmax64(row) for row in x.double().tolist()], dtype=torch.float64)
    expected = every.gather(1, experts.long())
    # The score's error is relative to the exponent, which is at most 16 here.
    assert_close(weights, expected, expected, 2 if numerics == "native" else 1, 64)
    for token in range(9):
        logits = x[token].tolist()
        assert experts[token].tolist() == best(logits, 4)
        assert rows[token].tolist() == [choice * 9 + token for choice in range(4)]


def test_softmax_takes_batches_and_marks_finished_tokens(numerics: str) -> None:
    x = normal(2, 3, 8)
    finished = torch.zeros(2, 3, dtype=torch.bool)
    finished[1, 2] = True
    weights, experts, rows = moe_gating.npu_moe_gating_top_k_softmax(x, finished, 2)
    flat = moe_gating.npu_moe_gating_top_k_softmax(x.view(6, 8), None, 2)
    assert torch.equal(weights.view(6, 2), flat[0])
    assert torch.equal(rows.view(6, 2), flat[2])
    assert experts[1, 2].tolist() == [8, 8]
    assert torch.equal(experts.view(6, 2)[:5], flat[1][:5])


CASES = [
    {"groups": 1, "kept": 1, "mode": 1, "sigmoid": False, "renorm": False},
    {"groups": 1, "kept": 1, "mode": 1, "sigmoid": False, "renorm": True},
    {"groups": 4, "kept": 2, "mode": 0, "sigmoid": False, "renorm": True},
    {"groups": 4, "kept": 2, "mode": 1, "sigmoid": True, "renorm": False},
    {"groups": 4, "kept": 4, "mode": 1, "sigmoid": True, "renorm": True},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gating_is_within_rounding_of_float64(
    numerics: str, dtype: torch.dtype, biased: bool, case: dict[str, Any]
) -> None:
    if numerics == "native" and dtype != torch.float32:
        pytest.skip("rounded scores may tie, so that other experts are right too")
    x = 2 * normal(7, 16, dtype=dtype)
    bias = 0.3 * normal(16, dtype=dtype, seed=1) if biased else None
    added = [0.0] * 16 if bias is None else bias.double().tolist()
    weights, experts, out = moe_gating.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=case["kept"], group_count=case["groups"], group_select_mode=case["mode"],
        renorm=int(case["renorm"]), norm_type=int(case["sigmoid"]), out_flag=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    assert (weights.dtype, experts.dtype, out.dtype) == (dtype, torch.int32, torch.float32)
    reference = [chosen64(row, added, 3, **case) for row in x.double().tolist()]
    assert experts.tolist() == [one for one, _ in reference]
    expected = 2.5 * torch.tensor([one for _, one in reference], dtype=torch.float64)
    assert_close(weights, expected, expected, 1, 64)


def test_the_custom_operator_returns_the_same(numerics: str) -> None:
    x, bias = normal(5, 8), normal(8, seed=3)
    ours = moe_gating.moe_gating_top_k(x, 2, 1, 2, 1, 1, 1, True, 1.5, 1e-20, bias)
    theirs = moe_gating.npu_moe_gating_top_k(
        x, 2, bias=bias, k_group=1, group_count=2, group_select_mode=1, renorm=1, norm_type=1, out_flag=True,
        routed_scaling_factor=1.5,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_equal_logits_go_to_the_lower_expert(numerics: str, dtype: torch.dtype) -> None:
    _, experts, _ = moe_gating.npu_moe_gating_top_k_softmax(torch.zeros(2, 6, dtype=dtype), None, 3)
    assert experts.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 0}, "k is 0; accepted: 1 to 8"),
        ({"k": 9}, "k is 9"),
        ({"x": torch.zeros(8)}, "x is shape (8,)"),
        ({"x": torch.zeros(3, 8, dtype=torch.int32)}, "x is torch.int32"),
        ({"x": torch.zeros(0, 8)}, "x is empty"),
        ({"finished": torch.zeros(3)}, "finished is torch.float32"),
        ({"finished": torch.zeros(2, dtype=torch.bool)}, "finished is shape (2,)"),
    ],
)
def test_softmax_refuses(change: dict[str, Any], words: str) -> None:
    refusal(SOFTMAX, moe_gating.npu_moe_gating_top_k_softmax, {"x": torch.zeros(3, 8), "k": 2} | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 33, "x": torch.zeros(3, 64)}, "k is 33; accepted: 1 to 32"),
        ({"k": 5, "group_count": 2}, "k is 5; accepted: 1 to 4"),
        ({"group_count": 3}, "group_count is 3; accepted: a divisor of 8"),
        ({"group_count": 4}, "group_count is 4; accepted: groups of more than 2 experts"),
        ({"group_count": 2, "k_group": 3}, "k_group is 3; accepted: 1 to 2"),
        ({"group_select_mode": 2}, "group_select_mode is 2"),
        ({"renorm": 2}, "renorm is 2"),
        ({"norm_type": 2}, "norm_type is 2"),
        ({"bias": torch.zeros(7)}, "bias is shape (7,)"),
        ({"bias": torch.zeros(8).half()}, "bias is torch.float16"),
        ({"x": torch.zeros(3, 4096)}, "1 to 2048 experts"),
    ],
)
def test_gating_refuses(change: dict[str, Any], words: str) -> None:
    refusal(GATING, moe_gating.npu_moe_gating_top_k, {"x": torch.zeros(3, 8), "k": 2} | change, words)
