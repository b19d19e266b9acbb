from __future__ import annotations

from typing import Any

import pytest
import torch
from simnpu_ops_reference import FLOATS, assert_close, normal, refusal
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import moe_routing

Tensor = torch.Tensor
ROUTING = "npu::npu_moe_init_routing_v2"


def ids(tokens: int, k: int, experts: int, seed: int = 0) -> Tensor:
    """Different experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]
    return torch.stack(rows).to(torch.int32) if rows else torch.zeros(0, k, dtype=torch.int32)


def sorted_choices(experts: list[int], first: int, end: int) -> list[int]:
    """Choice numbers expert by expert, each in order of its number."""
    return [at for expert in range(first, end) for at, one in enumerate(experts) if one == expert]


def options(experts: Tensor, expert_num: int, **changes: Any) -> dict[str, Any]:
    known = {"active_num": experts.numel(), "expert_num": expert_num, "expert_tokens_num_type": 1}
    return known | {"expert_tokens_num_flag": True, "active_expert_range": [0, expert_num]} | changes


@pytest.mark.parametrize("tokens", [0, 1, 6])
@pytest.mark.parametrize(("first", "end"), [(0, 8), (0, 4), (4, 8), (3, 4)])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_init_routing_sorts_by_expert(tokens: int, first: int, end: int, kind: int) -> None:
    x, experts = normal(tokens, 16, dtype=torch.bfloat16), ids(tokens, 3, 8)
    scale = normal(tokens, seed=4)
    rows, places, numbers, scales = moe_routing.npu_moe_init_routing_v2(
        x, experts, scale=scale, **options(experts, 8, active_expert_range=[first, end], expert_tokens_num_type=kind)
    )
    order = sorted_choices(experts.flatten().tolist(), first, end)
    assert rows.shape == (3 * tokens, 16)
    for row, choice in enumerate(order):
        assert torch.equal(rows[row], x[choice // 3])
        assert scales[row] == scale[choice // 3]
    assert not rows[len(order) :].any()
    assert places.dtype == torch.int32
    assert places.tolist() == [order.index(at) if at in order else -1 for at in range(3 * tokens)]
    counts = [experts.flatten().tolist().count(expert) for expert in range(first, end)]
    assert numbers.dtype == torch.int64
    if kind == 0:
        assert numbers.tolist() == [sum(counts[: at + 1]) for at in range(len(counts))]
    elif kind == 1:
        assert numbers.tolist() == counts
    else:
        used = [[first + at, count] for at, count in enumerate(counts) if count]
        assert numbers.tolist() == used + [[0, 0]] * (len(counts) - len(used))


def test_init_routing_scatters() -> None:
    x, experts = normal(4, 8), ids(4, 2, 6)
    _, places, _, _ = moe_routing.npu_moe_init_routing_v2(
        x, experts, **options(experts, 6, row_idx_type=1, active_expert_range=[2, 6])
    )
    order = sorted_choices(experts.flatten().tolist(), 2, 6)
    assert places.tolist() == order + [-1] * (8 - len(order))


def test_the_custom_operator_returns_the_same() -> None:
    x, experts = normal(5, 8), ids(5, 2, 4)
    ours = moe_routing.npu_moe_init_routing_custom(x, experts, **options(experts, 4, quant_mode=-1))
    theirs = moe_routing.npu_moe_init_routing_v2(x, experts, **options(experts, 4))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 2, 4)}, "x is shape (3, 2, 4)"),
        ({"expert_idx": torch.zeros(3, 2, dtype=torch.int64)}, "expert_idx is torch.int64"),
        ({"expert_idx": torch.zeros(2, 2, dtype=torch.int32)}, "expert_idx is shape (2, 2); accepted: 3 rows"),
        ({"expert_idx": torch.full((3, 2), 4, dtype=torch.int32)}, "expert_idx is from 4 to 4; accepted: 0 to 3"),
        ({"expert_idx": torch.full((3, 2), -1, dtype=torch.int32)}, "expert_idx is from -1 to -1"),
        ({"active_num": 5}, "active_num is 5; accepted: 6"),
        ({"expert_num": 0}, "expert_num is 0"),
        ({"active_expert_range": [2, 5]}, "active_expert_range is [2, 5]"),
        ({"active_expert_range": [2, 2]}, "active_expert_range is [2, 2]"),
        ({"expert_tokens_num_type": 3}, "expert_tokens_num_type is 3"),
        ({"row_idx_type": 2}, "row_idx_type is 2"),
        ({"scale": torch.zeros(2)}, "scale is shape (2,)"),
    ],
)
def test_init_routing_refuses(change: dict[str, Any], words: str) -> None:
    experts = ids(3, 2, 4)
    given: dict[str, Any] = {"x": torch.zeros(3, 8), "expert_idx": experts} | options(experts, 4)
    refusal(ROUTING, moe_routing.npu_moe_init_routing_v2, given | change, words)


@pytest.mark.parametrize(
    "change", [{"quant_mode": 1}, {"drop_pad_mode": 1}, {"expert_tokens_num_flag": False}, {"x_dtype": 3}]
)
def test_uses_that_are_left_out(change: dict[str, Any]) -> None:
    experts = ids(3, 2, 4)
    with pytest.raises(UnsimulatedOperator, match=ROUTING):
        moe_routing.npu_moe_init_routing_v2(torch.zeros(3, 8), experts, **options(experts, 4) | change)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("wanted", "rows"), [(None, 10), (0, 10), (7, 7), (99, 10), (-4, 6)])
def test_permute_sorts(dtype: torch.dtype, wanted: int | None, rows: int) -> None:
    tokens, experts = normal(5, 8), ids(5, 2, 6).to(dtype)
    permuted, places = moe_routing.npu_moe_token_permute(tokens, experts, wanted)
    order = sorted_choices(experts.flatten().tolist(), 0, 6)
    assert permuted.shape == (rows, 8)
    assert all(torch.equal(permuted[at], tokens[order[at] // 2]) for at in range(rows))
    assert places.dtype == torch.int32
    assert places.tolist() == [order.index(at) for at in range(10)]


def test_permute_takes_one_index_a_token_and_no_token() -> None:
    permuted, places = moe_routing.npu_moe_token_permute(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 1]))
    assert permuted.flatten().tolist() == [2, 3, 1]
    assert places.tolist() == [2, 0, 1]
    permuted, places = moe_routing.npu_moe_token_permute(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32))
    assert (permuted.shape, places.shape) == ((0, 4), (0,))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weights", FLOATS)
def test_unpermute_is_within_rounding_of_float64(numerics: str, dtype: torch.dtype, weights: torch.dtype) -> None:
    rows, probs = normal(12, 16, dtype=dtype), normal(4, 3, dtype=weights, seed=2)
    places = torch.randperm(12, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    y = moe_routing.npu_moe_token_unpermute(rows, places, probs)
    exact, size = torch.zeros(4, 16, dtype=torch.float64), torch.zeros(4, 16, dtype=torch.float64)
    for token in range(4):
        for choice in range(3):
            part = rows[places[3 * token + choice]].double() * probs[token, choice].double()
            exact[token] += part
            size[token] += part.abs()
    assert y.dtype == dtype
    if numerics == "native":
        assert_close(y, exact, size, 5, 8)
    else:
        assert_close(y, exact, exact, 1, 8, size)


def test_unpermute_undoes_permute() -> None:
    tokens, experts = normal(6, 8), ids(6, 1, 4)
    assert torch.equal(moe_routing.npu_moe_token_unpermute(*moe_routing.npu_moe_token_permute(tokens, experts)), tokens)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sorted_indices": torch.arange(6)}, "sorted_indices is torch.int64"),
        ({"sorted_indices": torch.tensor([0, 6], dtype=torch.int32)}, "sorted_indices is from 0 to 6"),
        ({"sorted_indices": torch.tensor([-1, 1], dtype=torch.int32)}, "sorted_indices is from -1 to 1"),
        ({"probs": torch.zeros(3, 3)}, "probs is shape (3, 3)"),
        ({"probs": torch.zeros(6)}, "probs is shape (6,)"),
        ({"permuted_tokens": torch.zeros(6)}, "permuted_tokens is shape (6,)"),
    ],
)
def test_unpermute_refuses(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "permuted_tokens": torch.zeros(6, 4),
        "sorted_indices": torch.arange(6, dtype=torch.int32),
        "probs": torch.zeros(3, 2),
    }
    refusal("npu::npu_moe_token_unpermute", moe_routing.npu_moe_token_unpermute, given | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": torch.zeros(2, 2, dtype=torch.int32)}, "indices is shape (2, 2); accepted: 3 rows"),
        ({"indices": torch.zeros(3, 2)}, "indices is torch.float32"),
        ({"indices": torch.zeros(3, 513, dtype=torch.int32)}, "1 to 512 columns"),
        ({"tokens": torch.zeros(3)}, "tokens is shape (3,)"),
    ],
)
def test_permute_refuses(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"tokens": torch.zeros(3, 4), "indices": torch.zeros(3, 2, dtype=torch.int32)}
    refusal("npu::npu_moe_token_permute", moe_routing.npu_moe_token_permute, given | change, words)


def test_padded_mode_is_left_out() -> None:
    places = torch.arange(3, dtype=torch.int32)
    with pytest.raises(UnsimulatedOperator, match="padded_mode"):
        moe_routing.npu_moe_token_permute(torch.zeros(3, 4), places, padded_mode=True)
    with pytest.raises(UnsimulatedOperator, match="padded_mode"):
        moe_routing.npu_moe_token_unpermute(torch.zeros(3, 4), places, padded_mode=True)
