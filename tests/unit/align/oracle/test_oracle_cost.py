"""The cost of Llama-3-8B, against numbers computed by hand from its published shapes."""

from __future__ import annotations

import json

import pytest

from align.checkpoints.table import structure_of
from align.oracle import capture_cost, cost_table, estimate
from align.oracle.cost import Rates, measured_rates

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
STRUCTURE = structure_of(LLAMA3_8B)
#: q and o 4096², k and v 4096 x 1024, gate, up and down 4096 x 14336.
LAYER = 2 * 16_777_216 + 2 * 4_194_304 + 3 * 58_720_256
HEAD = 128_256 * 4096


def test_the_weights_are_those_of_an_8b_model() -> None:
    assert LAYER == 218_103_808
    assert 32 * (LAYER + 2 * 4096) + 2 * HEAD + 4096 == 8_030_261_248  # parameters of the model
    cost = estimate(STRUCTURE, "bfloat16", rows=512, steps=16, requests=4)
    # The embedding gives its 512 rows at most; norms 65 x 4096.
    assert cost.weight_bytes == 2 * (32 * LAYER + HEAD + 65 * 4096 + 512 * 4096)
    assert cost.weight_bytes == 15_014_043_648


def test_products_by_hand() -> None:
    rows, steps, requests = 512, 16, 4
    cost = estimate(STRUCTURE, "bfloat16", rows, steps, requests=requests)
    linear = 2 * rows * 32 * LAYER + 2 * steps * requests * HEAD
    attention = 32 * 4 * 2 * rows * rows * 4096  # four products of 32 heads x 128
    assert cost.flops == linear + attention
    assert cost.flops == 7_146_825_580_544 + 67_243_081_728 + 274_877_906_944
    shorter = estimate(STRUCTURE, "bfloat16", rows, steps, requests=requests, span=128)
    assert cost.flops - shorter.flops == attention * 3 // 4


def test_records_by_hand() -> None:
    cost = estimate(STRUCTURE, "float16", rows=10, steps=2, requests=1)
    # Channels of a row: what each checkpoint has, and what its operator reads.
    outputs = {
        "block_in": 4096, "attn_norm": 4096, "q": 4096, "k": 1024, "v": 1024, "q_rope": 4096, "k_rope": 1024,
        "key_states": 1024, "value_states": 1024, "slots": 1, "out": 4096, "o": 4096, "mid": 4096, "mlp_norm": 4096,
        "gate": 14336, "up": 14336, "act": 14336, "down": 4096,
    }  # fmt: skip
    inputs = 4096 * 2 + 4096 + 4096 * 3 + 4096 + 1024 + 1024 + 1024 + (4096 + 1024 + 1024) + 4096 + 8192 + 4096
    inputs += 4096 * 2 + 14336 * 2 + 14336
    layers = 32 * (sum(outputs.values()) + inputs) - 4096  # the first block has one input
    once = 4096 + (4096 + 8192) + 2 * 4096
    assert cost.record_bytes == 2 * (10 * (layers + once) + 2 * (128_256 + 4096))


def test_memory_is_that_of_the_widest_operator_and_does_not_grow_with_layers() -> None:
    shallow = structure_of({**LLAMA3_8B, "num_hidden_layers": 2})
    deep, short = (estimate(one, "bfloat16", 512, 16).memory for one in (STRUCTURE, shallow))
    assert deep == short
    assert 0.5e9 < deep < 2e9
    alone = estimate(STRUCTURE, "bfloat16", 512, 16, names=["layers.0.mlp_norm"])
    assert alone.weight_bytes == 8192
    assert alone.record_bytes == 512 * 2 * 4096 * 2
    assert alone.memory == 512 * 8192 * 2 + 512 * 4096 * 8 * 14
    assert alone.what == "oracle, 1 checkpoint"


def test_time_follows_the_rates() -> None:
    slow = estimate(STRUCTURE, "bfloat16", 512, 16, rates=Rates(1e10, 1e9, 1e9, 2e-3))
    fast = estimate(STRUCTURE, "bfloat16", 512, 16, rates=Rates(2e10, 2e9, 2e9, 1e-3))
    assert slow.seconds == pytest.approx(2 * fast.seconds)
    names = sum(1 for _ in STRUCTURE.names())
    by_hand = slow.flops / 1e10 + slow.element_work / 1e9 + slow.bytes_read / 1e9 + names * 16 * 2e-3
    assert slow.seconds == pytest.approx(by_hand)
    rates = measured_rates(0.05)
    assert rates.products > 1e8 and rates.elements > 1e7


def test_a_capture_by_hand() -> None:
    rows, steps, requests = 512, 16, 4
    every = capture_cost(STRUCTURE, "bfloat16", rows, steps, requests=requests)
    channels = 32 * (4096 * 9 + 1024 * 5 + 14336 * 3) + 3 * 4096
    values = 2 * (rows * channels + steps * requests * 128_256) + 32 * rows * 8  # slots are int64
    # Twelve numbers of each row of 17 checkpoints a layer, of embed, final_in and final_norm, of the rows of logits;
    # four of each step.
    kept = 4 * (12 * (rows * (17 * 32 + 3) + steps * requests) + 4 * steps * (17 * 32 + 4))
    assert every.record_bytes == values + kept
    little = capture_cost(STRUCTURE, "bfloat16", rows, steps, requests=requests, values=["layers.2.mlp.*"])
    assert little.record_bytes == 2 * rows * (3 * 14336 + 4096) + kept
    assert little.what == "capture, values of layers.2.mlp.*"
    assert every.flops == 2 * 512 * 32 * LAYER + 2 * 64 * HEAD
    sampled = capture_cost(STRUCTURE, "bfloat16", rows, steps, requests=requests, sample_rows=1)
    assert sampled.flops == 2 * 16 * 32 * LAYER + 2 * 64 * HEAD
    assert capture_cost(STRUCTURE, "bfloat16", rows, steps, largest_step=256).memory < every.memory


def test_a_lean_capture_by_hand() -> None:
    lean = capture_cost(STRUCTURE, "bfloat16", 512, 16, requests=4, values=(), digested=20)
    floats = 17 * 32 + 4
    heads = 32 * (
        3 * 32 + 5 * 8
    )  # query before and after rope and the output; key before and after rope, value, cached
    plain = floats - 8 * 32
    assert lean.record_bytes == 4 * (floats * (20 * 9 + 16 * 4 + 2 * (8 * 4 + 5 * 5)) + 2 * 3 * (heads + plain))


def test_the_table_is_text() -> None:
    costs = [estimate(STRUCTURE, "bfloat16", 512, 16, requests=4), capture_cost(STRUCTURE, "bfloat16", 512, 16)]
    lines = cost_table(costs).splitlines()
    assert len(lines) == 3
    assert "oracle, every checkpoint" in lines[1] and "15 GB" in lines[1] and "7.49 TFLOP" in lines[1]
    assert "capture, every value" in lines[2]
    assert json.loads(json.dumps(costs[0].to_dict()))["flops"] == costs[0].flops


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int4.*bfloat16"):
        estimate(STRUCTURE, "int4", 1, 1)
    with pytest.raises(ValueError, match="int4"):
        capture_cost(STRUCTURE, "int4", 1, 1)
