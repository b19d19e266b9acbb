from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch_npu._sim import registry

OPERATORS = registry.load_operators()

SIMULATED = {
    "_C_ascend::get_masked_input_and_mask",
    "_C_ascend::moe_gating_top_k",
    "_C_ascend::npu_add_rms_norm_bias",
    "_C_ascend::npu_gemma_rms_norm",
    "_C_ascend::npu_moe_init_routing_custom",
    "atb::_npu_flash_attention",
    "atb::_npu_flash_attention_unpad",
    "atb::_npu_matmul_add_fp32",
    "atb::_npu_paged_attention",
    "atb::_npu_reshape_and_cache",
    "atb::_npu_reshape_and_cache_siso",
    "atb::_npu_rotary_embedding",
    "npu::get_npu_format",
    "npu::npu_add_rms_norm",
    "npu::npu_apply_rotary_pos_emb",
    "npu::npu_format_cast",
    "npu::npu_format_cast_.acl_format",
    "npu::npu_fused_infer_attention_score",
    "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_grouped_matmul",
    "npu::npu_grouped_matmul.List",
    "npu::npu_incre_flash_attention",
    "npu::npu_linear",
    "npu::npu_moe_distribute_combine_v2",
    "npu::npu_moe_distribute_dispatch_v2",
    "npu::npu_moe_gating_top_k",
    "npu::npu_moe_gating_top_k_softmax",
    "npu::npu_moe_init_routing_v2",
    "npu::npu_moe_token_permute",
    "npu::npu_moe_token_unpermute",
    "npu::npu_mrope",
    "npu::npu_prompt_flash_attention",
    "npu::npu_rms_norm",
    "npu::npu_rotary_mul",
    "npu::npu_scatter_nd_update_",
    "npu::npu_scatter_pa_kv_cache",
    "npu::npu_silu",
    "npu::npu_swiglu",
    "npu::npu_top_k_top_p",
}


def test_the_operators_of_eager_models_are_simulated() -> None:
    assert set(OPERATORS) == SIMULATED
    assert all(one.source for one in OPERATORS.values())


def test_the_tables_name_their_versions(simnpu_path: Path) -> None:
    tables = simnpu_path / "torch_npu" / "_sim" / "signatures"
    versions = {
        "npu.txt": "torch_npu 2.11",
        "atb.txt": "torch_npu 2.11",
        "c_ascend.txt": "vllm-ascend 0.23.0",
    }
    assert {path.name for path in tables.iterdir()} == set(versions)
    for name, version in versions.items():
        first = (tables / name).read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# ")
        assert version in first


def test_every_line_of_the_tables_is_a_signature() -> None:
    signatures = registry.load_signatures()
    counts = dict.fromkeys(("npu", "atb", "_C_ascend"), 0)
    for qualified, signature in signatures.items():
        assert qualified == f"{signature.namespace}::{signature.name}"
        counts[signature.namespace] += 1
    assert counts == {"npu": 421, "atb": 37, "_C_ascend": 66}


def test_torch_accepts_all_but_six_signatures_and_every_simulated_one() -> None:
    refused = {signature.qualified: reason for signature, reason in registry.refused_signatures()}
    assert set(refused) == {
        "npu::empty_with_format.names",
        "npu::npu_max.names_dim",
        "npu::npu_min.names_dim",
        "npu::wrap_allgather_base_uneven_inner",
        "npu::wrap_batch_isend_irecv_inner",
        "npu::wrap_reduce_scatter_base_uneven_inner",
    }
    assert all(reason.startswith(("unknown type", "Unknown custom class type")) for reason in refused.values())
    assert not set(refused) & set(OPERATORS)


@pytest.mark.parametrize("qualified", sorted(OPERATORS))
def test_a_function_takes_the_arguments_of_its_schema(qualified: str) -> None:
    simulated = OPERATORS[qualified]
    parameters = list(inspect.signature(simulated.function, eval_str=True).parameters.values())
    arguments = list(simulated.schema.arguments)
    gathered = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    named = {one.name: one for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    if gathered:
        assert {one.name for one in arguments} > set(named)
    else:
        assert list(named) == [one.name for one in arguments]
    for argument in arguments:
        parameter = named.get(argument.name)
        if parameter is None:
            assert argument.kwarg_only
            assert argument.default_value in (None, 0)
            continue
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) is argument.kwarg_only
        if parameter.default is inspect.Parameter.empty:
            assert not argument.has_default_value()
        else:
            assert argument.has_default_value()
            assert parameter.default == argument.default_value


@pytest.mark.parametrize("qualified", sorted(OPERATORS))
def test_every_operator_has_an_output_or_an_input_to_fault(qualified: str) -> None:
    simulated = OPERATORS[qualified]
    arguments = {one.name: one for one in simulated.schema.arguments}
    written = [one for one in arguments.values() if one.alias_info and one.alias_info.is_write]
    if simulated.faulted_input is not None:
        assert "Tensor" in str(arguments[simulated.faulted_input].type)
        assert simulated.faulted_input not in {one.name for one in written}
    else:
        assert written or simulated.schema.returns


def test_an_operator_outside_the_tables_is_refused() -> None:
    with pytest.raises(KeyError, match="npu::npu_invented is in none of the tables"):
        registry.operator("npu::npu_invented")(torch.neg)


def test_odd_spellings_are_normalised() -> None:
    signatures = registry.load_signatures()
    assert "int? kernel_type" in signatures["atb::_npu_flash_attention_unpad_v2"].text
    assert 'layout_query="BSND"' in signatures["_C_ascend::npu_lightning_indexer"].text
    assert registry._normalised("f(Tensor x, int ? n = 0, ) -> Tensor") == "f(Tensor x, int? n = 0) -> Tensor"


def test_faults_are_parsed() -> None:
    faults = registry._parse_faults("npu_swiglu:scale=1.5, atb::_npu_paged_attention:scale=0.5", OPERATORS)
    assert faults == {"npu::npu_swiglu": 1.5, "atb::_npu_paged_attention": 0.5}
    assert registry._parse_faults("", OPERATORS) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("npu_invented:scale=2", "names 'npu_invented', which is not simulated; name one of: _C_ascend::get"),
        ("npu_moe_re_routing:scale=2", "names 'npu_moe_re_routing', which is not simulated"),
        ("npu_swiglu", "'npu_swiglu' is not of the form operator:scale=factor"),
        ("npu_swiglu:scale=big", "'npu_swiglu:scale=big' is not of the form"),
        ("npu_swiglu:shift=1", "is not simulated"),
    ],
)
def test_other_faults_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="ALIGN_SIMNPU_FAULT") as caught:
        registry._parse_faults(text, OPERATORS)
    assert words in str(caught.value)


def test_a_missing_attribute_raises_when_called() -> None:
    stand_in = registry.missing("npu_invented")
    assert stand_in.__name__ == "npu_invented"
    with pytest.raises(
        registry.UnsimulatedOperator, match=r"torch_npu\.npu_invented is in none of the signature tables"
    ):
        stand_in(1, two=2)
