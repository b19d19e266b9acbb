"""Names of weights, against transformers, and the rows of fused parameters, against a fusion by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from align.checkpoints.parameters import FUSED, LivePlace, Parameter, parameters, rows_of
from align.checkpoints.shards import Shard
from align.checkpoints.table import Structure, structure_of

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
}
MODELS: dict[str, Any] = {
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
}


def structure(architecture: str = "Qwen3ForCausalLM", tp: int = 1) -> Structure:
    return structure_of({"architectures": [architecture], **SIZES}, tp)


@pytest.mark.parametrize("architecture", MODELS)
def test_every_tensor_of_a_checkpoint_has_a_row(architecture: str) -> None:
    config, model = MODELS[architecture]
    shapes = {name: value.shape for name, value in model(config(**SIZES)).state_dict().items()}
    known = {one.tensor: one for one in parameters(structure(architecture))}
    assert set(shapes) <= set(known)
    assert all(known[name].bias for name in set(known) - set(shapes)), "only biases may be absent"
    for name, shape in shapes.items():
        one = known[name]
        _, share = rows_of(one, structure(architecture), 0)
        if share is not None:
            assert (share.start, share.count, share.total) == (0, shape[0], shape[0]), name


def by_tensor(tensor: str, tp: int = 1) -> tuple[Parameter, Structure]:
    made = structure(tp=tp)
    return next(one for one in parameters(made) if one.tensor == tensor), made


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_fusion_by_hand_is_taken_apart(tp: int) -> None:
    """q, k, v and gate, up of every rank below each other, key heads copied where ranks outnumber them."""
    q, k, v = (torch.randn(heads * 4, 32) for heads in (8, 2, 2))
    gate, up = torch.randn(48, 32), torch.randn(48, 32)
    copies = max(1, tp // 2)
    for rank in range(tp):
        mine = [
            q.chunk(tp)[rank],
            k.chunk(tp // copies)[rank // copies],
            v.chunk(tp // copies)[rank // copies],
        ]
        fused = {"qkv": torch.cat(mine), "gate_up": torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])}
        for part, whole in {"q": q, "k": k, "v": v, "gate": gate, "up": up}.items():
            where = "self_attn" if part in "qkv" else "mlp"
            one, made = by_tensor(f"model.layers.1.{where}.{part}_proj.weight", tp)
            first, share = rows_of(one, made, rank)
            assert share is not None
            live = fused["qkv" if part in "qkv" else "gate_up"]
            assert torch.equal(live[first : first + share.count], whole[share.start : share.start + share.count]), (
                f"{part} of rank {rank}"
            )
            assert share.total == whole.shape[0]


def test_where_the_parts_live() -> None:
    one, made = by_tensor("model.layers.1.self_attn.k_proj.bias")
    assert (one.kind, one.layer, one.part, one.bias) == ("attn.k", 1, "k", True)
    assert one.live == "model.layers.1.self_attn.qkv_proj.bias"
    assert rows_of(one, made, 0)[0] == 8 * 4, "behind the queries"
    whole, made = by_tensor("model.layers.0.mlp.down_proj.weight", tp=2)
    assert (whole.split, rows_of(whole, made, 1)) == ("columns", (0, None))
    head, _ = by_tensor("lm_head.weight")
    assert (head.kind, head.layer, head.split) == ("logits", None, "vocab")


def test_each_part_knows_its_fusion() -> None:
    assert {part: [name for name, _ in FUSED[part]] for part in FUSED} == {
        **{part: ["q", "k", "v"] for part in "qkv"},
        "gate": ["gate", "up"],
        "up": ["gate", "up"],
        "shared.gate": ["shared.gate", "shared.up"],
        "shared.up": ["shared.gate", "shared.up"],
    }


def test_every_expert_has_its_place_in_both_engines() -> None:
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    sizes = {**SIZES, **experts, "shared_expert_intermediate_size": 28}
    made = structure_of({**sizes, "architectures": ["Qwen2MoeForCausalLM"]})
    found = {one.tensor: one for one in parameters(made)}
    up = found["model.layers.1.mlp.experts.2.up_proj.weight"]
    assert up.places == (
        LivePlace("model.layers.1.mlp.experts.gate_up.weight", 2, True),
        LivePlace("model.layers.1.mlp.experts.w13_weight", 2, True),
    )
    assert not up.sole
    first, share = rows_of(up, made, 0)
    assert (first, share) == (20, Shard(0, 20, 20))
    shared = found["model.layers.0.mlp.shared_expert.up_proj.weight"]
    assert rows_of(shared, made, 0) == (28, Shard(0, 28, 28))
    assert shared.places == (LivePlace("model.layers.0.mlp.shared_expert.gate_up_proj.weight", None, False),)
    assert found["model.layers.0.mlp.gate.weight"].sole
    assert sum(".experts." in name for name in found) == 2 * 3 * 3


def test_layers_and_families_decide_which_there_are() -> None:
    names = [one.tensor for one in parameters(structure())]
    assert len(names) == len(set(names))
    assert sum("layers.1." in name for name in names) == sum("layers.0." in name for name in names)
    llama = [one.tensor for one in parameters(structure("LlamaForCausalLM"))]
    assert set(names) - set(llama) == {
        f"model.layers.{layer}.self_attn.{which}_norm.weight" for layer in (0, 1) for which in "qk"
    }
    assert not any("layers." in one.tensor for one in parameters(replace(structure(), layers=0)))
    sandwich = replace(structure("LlamaForCausalLM"), tags=("all", "gqa", "dense", "sandwich"))
    by_kind = {one.kind: one.tensor for one in parameters(sandwich) if one.layer == 1 and "layernorm" in one.tensor}
    assert by_kind == {
        "attn_norm": "model.layers.1.input_layernorm.weight",
        "attn.post_norm": "model.layers.1.post_attention_layernorm.weight",
        "mlp_norm": "model.layers.1.pre_feedforward_layernorm.weight",
        "mlp.post_norm": "model.layers.1.post_feedforward_layernorm.weight",
    }
