"""Which rows of an engine's tensors between router and sum are a step's own, for both engines' own words."""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.lmdeploy import experts as lmdeploy
from adapters.probe.dispatch import ALL_GATHER, ALL_TO_ALL, MC2, SUMMED, Dispatch, Part, divided
from adapters.probe.model_facts import IN_A_ROW, placed
from adapters.vllm import experts as vllm


class Method(Enum):
    ALLGATHER = auto()
    MC2 = auto()
    ALLTOALL = auto()


@pytest.mark.parametrize("tokens", range(1, 8))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_divide_rows_as_torch_does(tokens: int, ranks: int) -> None:
    """Each real row is on one rank, and pads on none."""
    for padded in (max(tokens, ranks), -(-tokens // ranks) * ranks):
        split = torch.tensor_split(torch.arange(padded), ranks)
        held = []
        for place in range(ranks):
            part = divided(MC2, tokens, padded, ranks, place).parts.get("moe.topk_ids", Part(0, 0, tokens))
            rows = split[place][part.skip : part.skip + part.rows].tolist()
            assert rows == list(range(part.first, part.first + part.rows))
            held += rows
        assert held == list(range(tokens))


def of_vllm(kind: Method | None, tokens: int, most: int, tp: tuple[int, int], dp: tuple[int, int]) -> Dispatch:
    padded = -(-most // tp[0]) * tp[0]
    context = SimpleNamespace(
        moe_comm_type=kind, num_tokens=tokens, max_tokens_across_dp=most, padded_num_tokens=padded
    )
    return vllm.dispatch_of(context, tp, dp)


def test_vllm_gathers_groups_padded_to_the_longest() -> None:
    found = of_vllm(Method.ALLGATHER, 3, 5, (1, 0), (2, 1))
    assert (found.method, found.padded, found.whole) == (ALL_GATHER, 5, ())
    assert found.parts == dict.fromkeys(("moe.topk_ids", "moe.topk_weights"), Part(5, 0, 3))
    assert of_vllm(Method.ALLGATHER, 3, 3, (2, 1), (1, 0)).parts == {}


def test_vllm_divides_what_it_dispatches_among_tensor_parallel_ranks() -> None:
    found = of_vllm(Method.MC2, 1, 1, (2, 1), (1, 0))  # one token and one pad: rank 1 has the pad
    assert (found.method, found.padded, found.parts["moe.topk_ids"]) == (MC2, 2, Part(0, 1, 0))
    assert found.whole == (SUMMED,)
    assert of_vllm(Method.ALLTOALL, 5, 5, (2, 1), (1, 0)).parts["moe.topk_weights"] == Part(0, 3, 2)
    assert of_vllm(Method.ALLTOALL, 5, 7, (1, 0), (2, 0)).parts == {}
    assert of_vllm(None, 5, 5, (1, 0), (1, 0)).method == ""


def of_lmdeploy(kind: Method, pad: int, tp: tuple[int, int], ep: int, **more: Any) -> Dispatch:
    metadata = SimpleNamespace(moe_comm_type=kind, pad_size=pad, tp_size=tp[0], tp_rank=tp[1], ep_size=ep)
    return lmdeploy.dispatch_of(metadata, 5, **more)


def test_lmdeploy_divides_what_it_dispatches() -> None:
    found = of_lmdeploy(Method.MC2, 1, (2, 1), 2)
    assert (found.method, found.padded, found.parts["moe.topk_ids"]) == (MC2, 6, Part(0, 3, 2))
    assert of_lmdeploy(Method.ALLTOALL, -3, (2, 0), 2).parts["moe.topk_ids"] == Part(0, 0, 3)
    assert of_lmdeploy(Method.ALLTOALL, -4, (1, 0), 2).method == ALL_TO_ALL


def test_lmdeploy_gathers_groups_one_after_the_other_without_pads() -> None:
    found = of_lmdeploy(Method.ALLGATHER, 0, (1, 0), 1, sizes=[3, 5], group=1)
    assert found.parts == {"moe.topk_weights": Part(3, 0, 5)} and found.whole == (SUMMED,)
    assert of_lmdeploy(Method.ALLGATHER, 0, (2, 0), 1).parts == {}


def test_the_experts_that_ranks_hold() -> None:
    layer: Any = SimpleNamespace(expert_list=[4, 5, 6, 7])
    assert placed([lmdeploy.placement(layer)] * 2, 1) == {"per_rank": 4, "order": IN_A_ROW}
    weight = torch.empty(8, 1, 1)
    layer = SimpleNamespace(expert_list=None, gate_up=SimpleNamespace(weight=weight))
    assert placed([lmdeploy.placement(layer)], 0) == {"per_rank": 8, "order": IN_A_ROW}
    shifted = torch.tensor([3, -1, -1, -1, -1, 0, 1, 2])
    layer = SimpleNamespace(_expert_map=shifted, local_num_experts=4)
    assert placed([vllm.placement(layer)], 1) == {"per_rank": 4, "order": [5, 6, 7, 0]}
    layer = SimpleNamespace(_expert_map=torch.tensor([0, 1, -1, -1]), local_num_experts=2)
    assert placed([vllm.placement(layer)], 0) == {"per_rank": 2, "order": IN_A_ROW}
