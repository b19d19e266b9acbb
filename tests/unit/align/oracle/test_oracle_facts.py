"""What the oracle reads in configurations, against transformers' configuration classes where they decide."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV3Config, Gemma2Config, Qwen2Config

from align.checkpoints.recompute import Routing
from align.checkpoints.table import structure_of
from align.oracle.facts import Window, facts_of
from align.oracle.plan import plan

BASE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 40,
}
STRUCTURE = structure_of(BASE)
GEMMA: dict[str, Any] = {**BASE, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}


def facts(**more: Any) -> Any:
    return facts_of({**BASE, **more}, STRUCTURE)


@pytest.mark.parametrize(
    "more",
    [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ],
)
def test_windows_are_those_of_qwen2(more: dict[str, Any]) -> None:
    read = Qwen2Config(**{key: value for key, value in {**BASE, **more}.items() if key != "architectures"})
    wanted = [
        read.sliding_window if kind == "sliding_attention" and read.sliding_window else None
        for kind in read.layer_types
    ]
    assert [window.size for window in facts(**more).windows] == wanted
    named = facts(**more, layer_types=read.layer_types)
    assert [window.size for window in named.windows] == wanted


def test_a_window_that_the_file_leaves_open_is_not_certain() -> None:
    found = facts(architectures=["Phi3ForCausalLM"], sliding_window=8).windows[0]
    assert found.size == 8 and "does not say for which layers" in found.why
    assert facts(architectures=["LlamaForCausalLM"], sliding_window=8).windows[0] == Window()
    assert set(facts(architectures=["MistralForCausalLM"], sliding_window=8).windows) == {Window(8)}
    assert set(facts(architectures=["MistralForCausalLM"], sliding_window=None).windows) == {Window()}
    mixed = facts(architectures=["XForCausalLM"], sliding_window=8, layer_types=["full_attention", "chunked_attention"])
    assert mixed.windows[0] == Window()
    assert mixed.windows[1].why == "attention of type chunked_attention is not recomputed"
    assert mixed.windows[2].why == "layer_types names 2 layers, this is layer 2"
    (task,) = plan(STRUCTURE, mixed, ["layers.1.attn.out"])
    assert task.why == mixed.windows[1].why


def test_gemma2() -> None:
    given = {"head_dim": 8, "query_pre_attn_scalar": 16}
    read = Gemma2Config(**{key: value for key, value in {**GEMMA, **given}.items() if key != "architectures"}).to_dict()
    plain = {**GEMMA, **given, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}
    structure = structure_of(plain)
    found = facts_of({**read, "architectures": ["Gemma2ForCausalLM"]}, structure)
    assert (found.softcap, found.logits_softcap, found.scale, found.norm_offset) == (50.0, 30.0, 0.25, 1.0)
    assert found.activation == read["hidden_activation"] == "gelu_pytorch_tanh"
    assert [window.size for window in found.windows] == [4096, None, 4096, None]
    tasks = plan(structure, found, ["layers.0.block_in", "layers.1.block_in", "layers.0.mlp.act"])
    assert [task.operator for task in tasks] == ["scale", "gelu_mul", "add"]


def test_deepseek_v3_routing() -> None:
    read = DeepseekV3Config(n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2).to_dict()
    assert facts_of(read, STRUCTURE).routing == Routing(16, 4, "sigmoid", True, 2.5, 4, 2, "best two")
    assert facts(num_experts=8, num_experts_per_tok=2).routing == Routing(8, 2, renormalize=False)
    assert facts(num_local_experts=8, num_experts_per_tok=2).routing == Routing(8, 2)
    assert facts().routing is None


def test_rope_beyond_the_structure() -> None:
    assert facts(partial_rotary_factor=0.5).rope["partial_rotary_factor"] == 0.5
    assert facts(model_type="glm").interleaved and not facts(model_type="llama").interleaved
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    found = facts_of({**BASE, "rope_parameters": by_layer}, structure_of({**BASE, "rope_parameters": by_layer}))
    (task,) = plan(STRUCTURE, found, ["layers.0.attn.q_rope"])
    assert task.why == "the rope parameters differ by kind of layer (full_attention, sliding_attention)"


def test_what_is_not_recomputed_is_said_before_anything_is_read() -> None:
    structure = structure_of({**BASE, "hidden_act": "tanhshrink"})
    found = facts_of({**BASE, "hidden_act": "tanhshrink"}, structure)
    tasks = {str(task.name): task for task in plan(structure, found, ["layers.0.mlp.act", "layers.0.mlp.up"])}
    assert tasks["layers.0.mlp.act"].why == "the activation tanhshrink is not recomputed"
    assert not tasks["layers.0.mlp.up"].why
