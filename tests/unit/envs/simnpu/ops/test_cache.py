from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simnpu_ops_reference import HALVES, normal, refusal
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import cache

Tensor = torch.Tensor
BLOCKS, SIZE, HEADS, DIM = 4, 16, 2, 8


def expect(before: Tensor, rows: Tensor, slots: list[int]) -> Tensor:
    """Write rows one by one, in float64 for floats: the reference of every cache write (exact, it only
    moves).
    """
    after = before.double().clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            after[slot // before.shape[1], slot % before.shape[1]] = row.double()
    return after


@pytest.mark.parametrize("dtype", [*HALVES, torch.int8])
@pytest.mark.parametrize("value_dim", [DIM, 24])
def test_reshape_and_cache_moves_rows_exactly(numerics: str, dtype: torch.dtype, value_dim: int) -> None:
    slots = [17, 0, -1, 63, 5]
    key, value = (10 * normal(5, HEADS, DIM, seed=1)).to(dtype), (10 * normal(5, HEADS, value_dim)).to(dtype)
    keys = (10 * normal(BLOCKS, SIZE, HEADS, DIM, seed=2)).to(dtype)
    values = (10 * normal(BLOCKS, SIZE, HEADS, value_dim, seed=3)).to(dtype)
    wanted = expect(keys, key, slots), expect(values, value, slots)
    cache._npu_reshape_and_cache(key, value, keys, values, torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(keys.double(), wanted[0])
    assert torch.equal(values.double(), wanted[1])


def test_siso_writes_the_key_alone() -> None:
    key, keys = (
        normal(3, HEADS, DIM, dtype=torch.float16),
        torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=torch.float16),
    )
    wanted = expect(keys, key, [33, 2, -1])
    cache._npu_reshape_and_cache_siso(key, keys, torch.tensor([33, 2, -1], dtype=torch.int32))
    assert torch.equal(keys.double(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_scatter_pa_moves_rows_exactly(dtype: torch.dtype, index: torch.dtype) -> None:
    slots = [1, 40, 22]
    key, value = (9 * normal(3, HEADS, DIM)).to(dtype), (9 * normal(3, HEADS, DIM, seed=1)).to(dtype)
    keys, values = (torch.ones(BLOCKS, SIZE, HEADS, DIM, dtype=dtype) for _ in range(2))
    wanted = expect(keys, key, slots), expect(values, value, slots)
    slot_mapping = torch.tensor(slots, dtype=index)
    cache.npu_scatter_pa_kv_cache(key, value, keys, values, slot_mapping, cache_mode="Norm")
    assert torch.equal(keys.double(), wanted[0])
    assert torch.equal(values.double(), wanted[1])


def test_writes_reach_a_cache_that_is_a_strided_view() -> None:
    pool = torch.zeros(2, BLOCKS, SIZE, HEADS, DIM, dtype=torch.float16).transpose(0, 1)
    keys, values = pool[:, 0], pool[:, 1]
    key = normal(2, HEADS, DIM, dtype=torch.float16)
    cache._npu_reshape_and_cache(key, -key, keys, values, torch.tensor([16, 3], dtype=torch.int32))
    assert torch.equal(pool[1, 0, 0], key[0])
    assert torch.equal(pool[0, 1, 3], -key[1])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_slots_round_trip(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, BLOCKS * SIZE))
    slots = data.draw(st.permutations(range(BLOCKS * SIZE)))[:count]
    key = torch.arange(count * HEADS * DIM).view(count, HEADS, DIM).remainder(127).to(torch.int8)
    keys, values = (torch.full((BLOCKS, SIZE, HEADS, DIM), -1, dtype=torch.int8) for _ in range(2))
    cache._npu_reshape_and_cache(key, key, keys, values, torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(keys.flatten(0, 1)[slots], key)
    untouched = sorted(set(range(BLOCKS * SIZE)) - set(slots))
    assert bool((keys.flatten(0, 1)[untouched] == -1).all())
    assert torch.equal(keys, values)


@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((6, 3), [[4], [0]]),
        ((4, 5, 2), [[1, 4], [3, 0], [0, 0]]),
        ((7,), [[6], [2], [0]]),
        ((3, 2, 2), [[2]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_scatter_nd_update_moves_exactly(shape: tuple[int, ...], indices: list[list[int]], dtype: torch.dtype) -> None:
    target = (5 * normal(*shape)).to(dtype)
    updates = (5 * normal(len(indices), *shape[len(indices[0]) :], seed=1)).to(dtype)
    wanted = target.double().clone()
    for index, update in zip(indices, updates, strict=True):
        wanted[tuple(index)] = update.double()
    assert cache.npu_scatter_nd_update_(target, torch.tensor(indices), updates) is target
    assert torch.equal(target.double(), wanted)


def rows(count: int, heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(count, heads, dim, dtype=dtype)


def pool(blocks: int = BLOCKS, dim: int = DIM, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(blocks, SIZE, HEADS, dim, dtype=dtype)


def numbers(*slots: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(slots, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slot_indices": numbers(0, 64)}, "slot_indices is from 0 to 64"),
        ({"slot_indices": numbers(0, -2)}, "slot_indices is from -2 to 0"),
        ({"slot_indices": numbers(0, 1, dtype=torch.int64)}, "slot_indices is torch.int64"),
        ({"slot_indices": numbers(0)}, "slot_indices is shape (1,)"),
        ({"slot_indices": numbers(0, 1)[None]}, "slot_indices is shape (1, 2)"),
        ({"slot_indices": numbers(), "key": rows(0), "value": rows(0)}, "slot_indices is empty"),
        ({"key": rows(2, heads=1)}, "key_cache is shape"),
        ({"key": rows(2).flatten(1)}, "key is shape (2, 16)"),
        ({"key_cache": pool(dtype=torch.bfloat16)}, "key_cache is torch.bfloat16"),
        ({"key": rows(2, dtype=torch.float64)}, "key is torch.float64"),
    ],
)
def test_reshape_and_cache_refuses(change: dict[str, Any], words: str) -> None:
    alone: dict[str, Any] = {"key": rows(2), "key_cache": pool(), "slot_indices": numbers(0, 1)}
    both = alone | {"value": rows(2), "value_cache": pool()} | change
    if "torch.float64" in words:
        both["value"] = both["key"]
    refusal("atb::_npu_reshape_and_cache", cache._npu_reshape_and_cache, both, words)
    single = {name: both[name] for name in alone}
    refusal("atb::_npu_reshape_and_cache_siso", cache._npu_reshape_and_cache_siso, single, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"value": rows(3)}, "value is shape (3, 2, 8)"),
        ({"value": rows(2, dtype=torch.bfloat16)}, "value is torch.bfloat16"),
        ({"value_cache": pool(blocks=3)}, "value_cache is shape (3, 16, 2, 8)"),
        ({"value_cache": pool(dim=16)}, "value_cache is shape (4, 16, 2, 16)"),
    ],
)
def test_reshape_and_cache_refuses_values_unlike_keys(change: dict[str, Any], words: str) -> None:
    both: dict[str, Any] = {"key": rows(2), "value": rows(2), "key_cache": pool(), "value_cache": pool()}
    arguments = both | {"slot_indices": numbers(0, 1)} | change
    refusal("atb::_npu_reshape_and_cache", cache._npu_reshape_and_cache, arguments, words)


SCATTER: dict[str, Any] = {
    "key": rows(2),
    "value": rows(2),
    "key_cache": pool(),
    "value_cache": pool(),
    "slot_mapping": numbers(0, 1),
    "cache_mode": "Norm",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_mode": "NZ"}, "cache_mode is 'NZ'"),
        ({"slot_mapping": numbers(0, 64)}, "slot_mapping is from 0 to 64"),
        ({"slot_mapping": numbers(0, 1).float()}, "slot_mapping is torch.float32"),
        ({"value": rows(3)}, "value is shape (3, 2, 8)"),
        ({"key_cache": pool(dim=4)}, "key_cache is shape (4, 16, 2, 4)"),
    ],
)
def test_scatter_pa_refuses(change: dict[str, Any], words: str) -> None:
    refusal("npu::npu_scatter_pa_kv_cache", cache.npu_scatter_pa_kv_cache, SCATTER | change, words)


@pytest.mark.parametrize("change", [{"cache_mode": "PA_NZ"}, {"seq_lens": numbers(1)}])
def test_scatter_pa_says_what_is_left_out(change: dict[str, Any]) -> None:
    with pytest.raises(UnsimulatedOperator, match=r"npu::npu_scatter_pa_kv_cache: .* is not simulated"):
        cache.npu_scatter_pa_kv_cache(**(SCATTER | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": torch.tensor([[6]])}, "indices is from 6 to 6 in axis 0"),
        ({"indices": torch.tensor([[-1]])}, "indices is from -1 to -1 in axis 0"),
        ({"indices": torch.tensor([1])}, "indices is shape (1,)"),
        ({"indices": torch.tensor([[1, 1, 1]])}, "indices is shape (1, 3)"),
        ({"updates": torch.zeros(1, 4)}, "updates is shape (1, 4)"),
        ({"updates": torch.zeros(1, 3).half()}, "updates is torch.float16"),
        ({"input": torch.zeros(6, 3, dtype=torch.float64)}, "input is torch.float64"),
    ],
)
def test_scatter_nd_update_refuses(change: dict[str, Any], words: str) -> None:
    arguments = {
        "input": torch.zeros(6, 3),
        "indices": torch.tensor([[1]]),
        "updates": torch.zeros(1, 3),
    } | change
    refusal("npu::npu_scatter_nd_update_", cache.npu_scatter_nd_update_, arguments, words)
