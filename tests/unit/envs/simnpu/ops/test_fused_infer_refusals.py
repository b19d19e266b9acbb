from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simnpu_ops_reference import normal, refusal
from torch_npu._sim import registry
from torch_npu._sim.checks import UnsimulatedOperator
from torch_npu._sim.ops import fused_infer

Tensor = torch.Tensor
HEADS, KV, DIM, SIZE = 4, 2, 32, 16
SCALE = 1 / math.sqrt(DIM)
V1, V2 = "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"
fia = fused_infer.npu_fused_infer_attention_score
fia_v2 = fused_infer.npu_fused_infer_attention_score_v2
COMMON: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": KV, "scale": SCALE}
TEMPLATE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def packed(queries: int, spans: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query [queries, HEADS, DIM], key and value [spans, KV, DIM]."""
    key, value = (normal(spans, KV, DIM, dtype=torch.float16, seed=seed) for seed in (1, 2))
    return normal(queries, HEADS, DIM, dtype=torch.float16), key, value


def tnd() -> dict[str, Any]:
    query, key, value = packed(5, 7)
    lengths = {"actual_seq_lengths": [3, 5], "actual_seq_lengths_kv": [5, 7], "input_layout": "TND"}
    return {"query": query, "key": key, "value": value} | lengths | COMMON


OTHER_MASK = TEMPLATE.clone()
OTHER_MASK[2000, 7] = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_layout": "SBH"}, "input_layout is 'SBH'"),
        ({"input_layout": "BSND"}, "query is shape (5, 4, 32)"),
        ({"query": torch.zeros(5, HEADS, DIM)}, "query is torch.float32"),
        (
            {"key": torch.zeros(7, KV, DIM).bfloat16(), "value": torch.zeros(7, KV, DIM).bfloat16()},
            "key is torch.bf",
        ),
        ({"value": torch.zeros(7, KV, 16).half()}, "value is shape (7, 2, 16)"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_key_value_heads": 4}, "key is of 2 heads"),
        ({"scale": math.inf}, "scale is inf"),
        ({"actual_seq_lengths": None}, "actual_seq_lengths is None"),
        ({"actual_seq_lengths": [3, 2]}, "actual_seq_lengths[1] is 2"),
        ({"actual_seq_lengths": [3, 4]}, "the last of actual_seq_lengths is 4"),
        ({"actual_seq_lengths": [-1, 5]}, "actual_seq_lengths[0] is -1"),
        ({"actual_seq_lengths": []}, "actual_seq_lengths is empty"),
        ({"actual_seq_lengths_kv": [5, 6]}, "the last of actual_seq_lengths_kv is 6"),
        ({"actual_seq_lengths_kv": [7]}, "actual_seq_lengths_kv is 1 long"),
        ({"actual_seq_lengths_kv": torch.tensor([5.0, 7.0])}, "actual_seq_lengths_kv is torch.float32"),
        ({"sparse_mode": 5, "atten_mask": TEMPLATE}, "sparse_mode is 5"),
        ({"sparse_mode": 3}, "atten_mask is None"),
        ({"sparse_mode": 3, "atten_mask": TEMPLATE[:1024, :1024]}, "atten_mask is shape (1024, 1024)"),
        ({"sparse_mode": 3, "atten_mask": TEMPLATE.half()}, "atten_mask is torch.float16"),
        ({"sparse_mode": 3, "atten_mask": TEMPLATE.t()}, "atten_mask is not causal"),
        ({"sparse_mode": 2, "atten_mask": OTHER_MASK}, "atten_mask is not causal"),
        ({"sparse_mode": 1}, "atten_mask is None"),
        ({"inner_precise": 4}, "inner_precise is 4"),
    ],
)
def test_tnd_refuses(change: dict[str, Any], words: str) -> None:
    refusal(V1, fia, tnd() | change, words)


def paged() -> dict[str, Any]:
    keys, values = (normal(6, SIZE, KV * DIM, dtype=torch.float16, seed=seed) for seed in (1, 2))
    table = torch.tensor([[4, 1, -7], [0, -7, -7], [-7, -7, -7]], dtype=torch.int32)
    lengths = {"actual_seq_lengths": [3, 5], "actual_seq_lengths_kv": [20, 2], "input_layout": "TND"}
    pages = {"query": packed(5, 0)[0], "key": keys, "value": values, "block_table": table, "block_size": SIZE}
    return pages | lengths | COMMON


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 24}, "block_size is 24"),
        ({"block_size": 32}, "key is shape (6, 16, 64)"),
        ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv is None"),
        ({"actual_seq_lengths_kv": [20, -1]}, "actual_seq_lengths_kv[1] is -1"),
        ({"actual_seq_lengths_kv": [20, 97]}, "actual_seq_lengths_kv[1] is 97"),
        ({"actual_seq_lengths_kv": [20]}, "actual_seq_lengths_kv is 1 long"),
        ({"actual_seq_lengths_kv": [50, 2]}, "block_table is 3 blocks of 16 wide"),
        ({"block_table": torch.zeros(1, 3, dtype=torch.int32)}, "block_table is shape (1, 3)"),
        ({"block_table": torch.zeros(2, 3)}, "block_table is torch.float32"),
        ({"block_table": torch.zeros(6, dtype=torch.int32)}, "block_table is shape (6,)"),
        ({"block_table": torch.full((2, 3), 6, dtype=torch.int32)}, "block_table[0] is block 6"),
        (
            {"actual_seq_lengths": [1, 3, 5], "actual_seq_lengths_kv": [1, 1]},
            "actual_seq_lengths_kv is 2 long",
        ),
    ],
)
def test_pages_refuse(change: dict[str, Any], words: str) -> None:
    refusal(V1, fia, paged() | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"atten_mask": torch.zeros(4, 5, dtype=torch.bool)}, "atten_mask is shape (4, 5)"),
        ({"atten_mask": torch.zeros(3, 4, 6, dtype=torch.bool)}, "atten_mask is shape (3, 4, 6)"),
        ({"atten_mask": torch.zeros(4, 6)}, "atten_mask is torch.float32"),
        ({"actual_seq_lengths": [5]}, "actual_seq_lengths[0] is 5"),
        ({"actual_seq_lengths": [1, 2, 3], "key": torch.zeros(3, 6, KV, DIM).half()}, "value is shape"),
        ({"actual_seq_lengths_kv": [6, 7]}, "actual_seq_lengths_kv[1] is 7"),
        (
            {"query": torch.zeros(3, 4, HEADS, DIM).half(), "actual_seq_lengths": [1, 2]},
            "actual_seq_lengths is 2 long",
        ),
        ({"query": torch.zeros(3, 4, HEADS, DIM).half()}, "key is a batch of 2"),
        ({"query": torch.zeros(2, 4, HEADS, 24).half()}, "head_dim of query is 24"),
        ({"query": torch.zeros(2, 4, HEADS, 16).half()}, "key is head_dim 32"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32), "block_size": 16}, "block_size is 16"),
    ],
)
def test_padded_layouts_refuse(change: dict[str, Any], words: str) -> None:
    tensors: dict[str, Any] = {"query": torch.zeros(2, 4, HEADS, DIM).half(), "input_layout": "BSND"}
    tensors |= {"key": torch.zeros(2, 6, KV, DIM).half(), "value": torch.zeros(2, 6, KV, DIM).half()}
    refusal(V1, fia, tensors | COMMON | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learnable_sink": torch.zeros(2).half()}, "learnable_sink is shape (2,)"),
        ({"learnable_sink": torch.zeros(HEADS)}, "learnable_sink is torch.float32"),
        ({"actual_seq_qlen": [3]}, "the last of actual_seq_qlen is 3"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0"),
        ({"num_query_heads": 300}, "num_query_heads is 300"),
    ],
)
def test_v2_refuses_under_its_own_names(change: dict[str, Any], words: str) -> None:
    query, key, value = packed(5, 7)
    arguments: dict[str, Any] = {"query": query, "key": key, "value": value, "input_layout": "TND"}
    arguments |= {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [5, 7]}
    arguments |= {"num_query_heads": HEADS, "num_key_value_heads": KV, "softmax_scale": SCALE}
    refusal(V2, fia_v2, arguments | change, words)


SIMULATED = {
    "query",
    "key",
    "value",
    "atten_mask",
    "actual_seq_lengths",
    "actual_seq_lengths_kv",
    "actual_seq_qlen",
    "actual_seq_kvlen",
    "block_table",
    "learnable_sink",
    "num_heads",
    "num_query_heads",
    "num_key_value_heads",
    "scale",
    "softmax_scale",
    "pre_tokens",
    "next_tokens",
    "input_layout",
    "sparse_mode",
    "inner_precise",
    "block_size",
    "softmax_lse_flag",
    "return_softmax_lse",
}


def left_out(qualified: str) -> list[tuple[str, Any]]:
    """List the arguments of a schema that are left out, each with a value that is not neutral."""
    found: list[tuple[str, Any]] = []
    for argument in registry.OPERATORS[qualified].schema.arguments:
        if argument.name not in SIMULATED:
            kind = str(argument.type)
            found.append((argument.name, torch.zeros(1) if "Tensor" in kind else [1] if "List" in kind else 1))
    return found


@pytest.mark.parametrize(("argument", "value"), left_out(V1))
def test_v1_says_which_argument_is_left_out(argument: str, value: Any) -> None:
    with pytest.raises(UnsimulatedOperator, match=rf"{V1}: argument {argument} \(.*\) is not simulated"):
        fia(**(tnd() | {argument: value}))


@pytest.mark.parametrize(("argument", "value"), left_out(V2))
def test_v2_says_which_argument_is_left_out(argument: str, value: Any) -> None:
    query, key, value_rows = packed(5, 7)
    with pytest.raises(UnsimulatedOperator, match=rf"{V2}: argument {argument} \(.*\) is not simulated"):
        fia_v2(query, key, value_rows, **{argument: value})


def test_the_left_out_arguments_are_many() -> None:
    assert len(left_out(V1)) == 23
    assert len(left_out(V2)) == 27


@pytest.mark.parametrize("change", [{"input_layout": "TND_NTD"}, {"atten_mask": torch.zeros(5, 7, dtype=torch.bool)}])
def test_v1_says_what_else_is_left_out(change: dict[str, Any]) -> None:
    with pytest.raises(UnsimulatedOperator, match=f"{V1}: .*{next(iter(change))}.* is not simulated"):
        fia(**(tnd() | change))


def test_a_mask_that_changes_in_place_is_noticed() -> None:
    mask = TEMPLATE.clone()
    arguments = tnd() | {"sparse_mode": 3, "atten_mask": mask}
    fia(**arguments)
    mask.zero_()
    refusal(V1, fia, arguments, "atten_mask is not causal")
