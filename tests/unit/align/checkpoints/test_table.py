"""The table of checkpoints and the structure of a model, against a list written down elsewhere and transformers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from align.checkpoints.table import ARCHITECTURES, Name, Structure, kinds, parse, structure_of

#: Every name of the specification, in the order of a model's computation.
LAYERED = [
    "block_in",
    "attn_norm",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.q_norm",
    "attn.k_norm",
    "attn.q_rope",
    "attn.k_rope",
    "attn.key_states",
    "attn.value_states",
    "attn.kv_start_indices",
    "attn.out",
    "attn.o_partial",
    "attn.o",
    "attn.post_norm",
    "mid",
    "mlp_norm",
    "mlp.gate",
    "mlp.up",
    "mlp.act",
    "mlp.down_partial",
    "mlp.down",
    "mlp.post_norm",
    "moe.router_logits",
    "moe.topk_ids",
    "moe.topk_weights",
    "moe.shared_gate",
    "moe.shared",
    "moe.routed",
    "moe.out",
]
SPECIFIED = ["embed", *LAYERED, "final_in", "final_norm", "logits"]
QWEN3_ONLY = {"attn.q_norm", "attn.k_norm"}
SANDWICH = {"attn.post_norm", "mlp.post_norm"}
PARTIAL = {"attn.o_partial", "mlp.down_partial"}
MOE = {name for name in LAYERED if name.startswith("moe.")}
SHARED = {"moe.shared", "moe.shared_gate"}
MLP = {"mlp.gate", "mlp.up", "mlp.act", "mlp.down"}

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 72,
}
GEMMAS = ("Gemma2ForCausalLM",)
WITH_EXPERTS = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
GEMMA2: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "layer_types": ["full_attention"] * 3,
    "query_pre_attn_scalar": 24,
}
LLAMA = {**QWEN3, "architectures": ["LlamaForCausalLM"], "head_dim": None, "tie_word_embeddings": False}


def present(structure: Structure) -> set[str]:
    return {name.kind.name for name in structure.names()}


def test_every_name_of_the_specification_is_a_row_in_its_order() -> None:
    assert list(kinds()) == SPECIFIED
    assert [kind.index for kind in kinds().values()] == list(range(len(SPECIFIED)))
    assert {name for name, kind in kinds().items() if kind.per_layer} == set(LAYERED)


def test_shapes_and_shards_name_axes_that_exist() -> None:
    for name, kind in kinds().items():
        assert kind.axes[0] == ("requests" if name == "logits" else "tokens")
        assert kind.shard in ("", "partial", *kind.axes[1:])
    heads = {"attn.q", "attn.q_norm", "attn.q_rope", "attn.out"}
    keys = {"attn.k", "attn.v", "attn.k_norm", "attn.k_rope", "attn.key_states", "attn.value_states"}
    assert {name for name, kind in kinds().items() if kind.shard == "heads"} == heads
    assert {name for name, kind in kinds().items() if kind.shard == "kv_heads"} == keys
    assert {name for name, kind in kinds().items() if kind.integer} == {"attn.kv_start_indices", "moe.topk_ids"}


@pytest.mark.parametrize(
    ("config", "tp", "without"),
    [
        (QWEN3, 1, MOE | SANDWICH | PARTIAL),
        (QWEN3, 2, MOE | SANDWICH),
        (LLAMA, 1, MOE | SANDWICH | PARTIAL | QWEN3_ONLY),
        (LLAMA, 2, MOE | SANDWICH | QWEN3_ONLY),
        ({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}, 1, MOE | SANDWICH | PARTIAL | QWEN3_ONLY),
        ({**QWEN3, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"]}, 1, MLP | SANDWICH | SHARED | PARTIAL),
        ({**LLAMA, **EXPERTS, "architectures": ["Qwen2MoeForCausalLM"]}, 1, MLP | SANDWICH | PARTIAL | QWEN3_ONLY),
        (GEMMA2, 1, MOE | PARTIAL | QWEN3_ONLY),
        (GEMMA2, 2, MOE | QWEN3_ONLY),
    ],
)
def test_which_checkpoints_a_model_has(config: dict[str, Any], tp: int, without: set[str]) -> None:
    structure = structure_of(config, tp)
    assert present(structure) == set(SPECIFIED) - without
    names = [str(name) for name in structure.names()]
    per_layer = [name for name in LAYERED if name not in without]
    expected = [f"layers.{layer}.{name}" for layer in range(3) for name in per_layer]
    assert names == ["embed", *expected, "final_in", "final_norm", "logits"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tp", [1, 2])
def test_an_operator_reads_what_was_computed_before(architecture: str, tp: int) -> None:
    structure = structure_of({**GEMMA2, **EXPERTS, "architectures": [architecture]}, tp)
    names = list(structure.names())
    place = {name: index for index, name in enumerate(names)}
    assert names == sorted(names, key=lambda name: name.order)
    for name in names:
        inputs = structure.inputs(name)
        assert all(place[other] < place[name] for other in inputs), f"{name} reads {list(map(str, inputs))}"
        sources = {"embed", "attn.kv_start_indices"}
        assert bool(inputs) == (name.kind.name not in sources), name


def reads(structure: Structure, name: str) -> list[str]:
    return [str(other) for other in structure.inputs(parse(name))]


def test_inputs_by_hand() -> None:
    qwen, llama = structure_of(QWEN3), structure_of(LLAMA)
    assert reads(qwen, "layers.0.block_in") == ["embed"]
    assert reads(qwen, "layers.2.block_in") == ["layers.1.mid", "layers.1.mlp.down"]
    assert reads(qwen, "layers.1.attn.q_rope") == ["layers.1.attn.q_norm"]
    assert reads(llama, "layers.1.attn.q_rope") == ["layers.1.attn.q"]
    assert reads(llama, "layers.1.attn.key_states") == ["layers.1.attn.k_rope"]
    assert reads(qwen, "layers.1.attn.out") == [
        "layers.1.attn.q_rope",
        "layers.1.attn.key_states",
        "layers.1.attn.value_states",
    ]
    assert reads(qwen, "layers.0.mid") == ["layers.0.block_in", "layers.0.attn.o"]
    assert reads(qwen, "layers.0.mlp.act") == ["layers.0.mlp.gate", "layers.0.mlp.up"]
    assert reads(qwen, "final_in") == ["layers.2.mid", "layers.2.mlp.down"]
    assert reads(qwen, "logits") == ["final_norm"]
    gemma = structure_of(GEMMA2)
    assert reads(gemma, "layers.0.mid") == ["layers.0.block_in", "layers.0.attn.post_norm"]
    assert reads(gemma, "layers.1.attn.post_norm") == ["layers.1.attn.o"]
    assert reads(gemma, "layers.2.block_in") == ["layers.1.mid", "layers.1.mlp.post_norm"]
    assert reads(gemma, "final_in") == ["layers.2.mid", "layers.2.mlp.post_norm"]


def test_under_tensor_parallelism_the_sum_over_ranks_is_an_operator_of_its_own() -> None:
    one, two = structure_of(QWEN3), structure_of(QWEN3, tp=2)
    for whole, partial, source in (
        ("attn.o", "attn.o_partial", "attn.out"),
        ("mlp.down", "mlp.down_partial", "mlp.act"),
    ):
        assert one.operator(kinds()[whole]) == "linear"
        assert reads(one, f"layers.1.{whole}") == [f"layers.1.{source}"]
        assert two.operator(kinds()[whole]) == "all_reduce"
        assert reads(two, f"layers.1.{whole}") == [f"layers.1.{partial}"]
        assert two.operator(kinds()[partial]) == "linear"
        assert reads(two, f"layers.1.{partial}") == [f"layers.1.{source}"]


@pytest.mark.parametrize("tp", [1, 2])
def test_names_are_read_back(tp: int) -> None:
    for name in structure_of(QWEN3, tp).names():
        assert parse(str(name)) == name


@pytest.mark.parametrize("name", ["attn.q", "layers.0.embed", "layers.0.attn.r", "layers.x.attn.q", "layers.1.", ""])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint"):
        parse(name)


def test_order_over_layers() -> None:
    names = [parse(name) for name in ("logits", "layers.10.block_in", "final_in", "layers.2.mlp.down", "embed")]
    ordered = sorted(names, key=lambda name: name.order)
    assert [str(name) for name in ordered] == ["embed", "layers.2.mlp.down", "layers.10.block_in", "final_in", "logits"]
    for one, other in itertools.combinations(names, 2):
        assert one.order != other.order


def test_sizes_and_scalars() -> None:
    structure = structure_of(QWEN3, tp=2)
    axes = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    assert [structure.size(axis) for axis in axes] == [64, 4, 2, 32, 96, 100]
    assert (structure.layers, structure.eps, structure.tied, structure.tp) == (3, 1e-5, True, 2)
    assert structure.scale == pytest.approx(1 / 32**0.5)
    assert structure.rope == {"rope_theta": 5000.0, "rope_type": "default"}
    assert structure_of(LLAMA).head_dim == 16
    assert structure_of({**LLAMA, "num_key_value_heads": None}).kv_heads == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, {"rope_theta": 7.0, "rope_type": "default"}),
        ({"rope_scaling": None}, {"rope_theta": 5000.0, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_theta": 5000.0, "rope_type": "yarn", "factor": 4.0},
        ),
    ],
)
def test_rope_in_the_spellings_of_config_files(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert structure_of({**QWEN3, **given}).rope == expected


def _windows_of_transformers(architecture: str, config: dict[str, Any]) -> set[int | None]:
    classes: dict[str, Any] = {
        "LlamaForCausalLM": LlamaConfig,
        "MistralForCausalLM": MistralConfig,
        "Qwen2ForCausalLM": Qwen2Config,
        "Qwen3ForCausalLM": Qwen3Config,
    }
    read = classes[architecture](**config)
    if architecture == "LlamaForCausalLM":
        return {None}  # its model never looks at one
    if architecture == "MistralForCausalLM":
        return {read.sliding_window}  # of every layer (MistralModel.forward)
    return {read.sliding_window if kind == "sliding_attention" else None for kind in read.layer_types}


@pytest.mark.parametrize("architecture", [one for one in ARCHITECTURES if one not in (*WITH_EXPERTS, *GEMMAS)])
@pytest.mark.parametrize("use", [None, False, True])
@pytest.mark.parametrize("first", [0, 3, 28])
def test_the_window_is_that_of_transformers(architecture: str, use: bool | None, first: int) -> None:
    config = {**QWEN3, "architectures": [architecture], "sliding_window": 8, "max_window_layers": first}
    if use is not None:
        config["use_sliding_window"] = use
    assert {structure_of(config).window} == _windows_of_transformers(architecture, config)


def test_gemma2_is_what_its_configuration_class_reads() -> None:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    given = {
        **{key: GEMMA2[key] for key in (*keys, "intermediate_size")}, "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "layer_types": ["sliding_attention"] * 3,
    }  # fmt: skip
    read, found = Gemma2Config(**given), structure_of(given)
    assert found.scale == read.query_pre_attn_scalar**-0.5 and found.head_dim == read.head_dim
    assert (found.window, found.tied, found.activation) == (
        read.sliding_window, read.tie_word_embeddings, read.hidden_activation,
    )  # fmt: skip
    made = structure_of(GEMMA2)
    assert (made.window, made.norm_offset, made.embed_scale) == (None, 1.0, 8.0)
    assert made.scale == pytest.approx(24**-0.5) != made.head_dim**-0.5
    assert made.operator(kinds()["mlp.act"]) == "gelu_mul"
    assert structure_of(QWEN3).operator(kinds()["mlp.act"]) == "silu_mul"
    for more, said in (
        ({"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8}, "window"),
        ({"layer_types": None}, "window"),
        ({"attn_logit_softcapping": 50.0}, "soft caps"),
        ({"final_logit_softcapping": 30.0}, "soft caps"),
    ):
        with pytest.raises(ValueError, match=said):
            structure_of({**GEMMA2, **more})
    with pytest.raises(ValueError, match="soft caps"):
        structure_of({key: value for key, value in GEMMA2.items() if key != "attn_logit_softcapping"})


def test_a_row_for_models_with_a_tag() -> None:
    gemma, qwen = structure_of(GEMMA2), structure_of(QWEN3)
    assert [(gemma.tagged(when), qwen.tagged(when)) for when in ("", "sandwich", "!sandwich")] == [
        (True, True), (True, False), (False, True),
    ]  # fmt: skip


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(
        ValueError, match="no checkpoints are defined for GPT2LMHeadModel; valid: Gemma2ForCausalLM, LlamaFor"
    ):
        structure_of({**QWEN3, "architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ValueError, match="unknown"):
        structure_of({key: value for key, value in QWEN3.items() if key != "architectures"})


def test_mixture_rows_appear_with_their_tags() -> None:
    structure = replace(structure_of(QWEN3), tags=("all", "gqa", "moe", "qwen3_moe"))
    assert present(structure) == set(SPECIFIED) - PARTIAL - MLP - SHARED - SANDWICH
    assert reads(structure, "layers.1.block_in") == ["layers.0.mid", "layers.0.moe.out"]
    assert reads(structure, "layers.1.moe.out") == ["layers.1.moe.routed"]


def test_experts_and_what_stands_beside_them() -> None:
    config = {**QWEN3, **EXPERTS}
    alone = structure_of({**config, "architectures": ["Qwen3MoeForCausalLM"]})
    beside = structure_of({**config, "architectures": ["Qwen2MoeForCausalLM"]})
    sizes = ("intermediate", "experts", "topk", "shared")
    assert [alone.size(axis) for axis in sizes] == [48, 8, 2, 0]
    assert [beside.size(axis) for axis in sizes] == [48, 8, 2, 72]
    assert alone.operator(kinds()["moe.out"]) == "identity"
    assert beside.operator(kinds()["moe.out"]) == "gated_add"
    assert reads(beside, "layers.1.moe.out") == [f"layers.1.moe.{one}" for one in ("routed", "shared", "shared_gate")]
    assert {name for name, kind in kinds().items() if kind.always} == {
        "attn.kv_start_indices", "moe.topk_ids", "moe.router_logits",
    }  # fmt: skip


@pytest.mark.parametrize("more", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_dense_layers_beside_experts_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="dense layers beside layers of experts"):
        structure_of({**QWEN3, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], **more})


def test_a_name_needs_a_layer_if_its_kind_has_them() -> None:
    with pytest.raises(AssertionError):
        str(Name(kinds()["attn.q"], None))
    with pytest.raises(AssertionError):
        str(Name(kinds()["logits"], 0))
