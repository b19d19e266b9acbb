"""Options of a side: their namespaces, and that they win over what both adapters ask for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from adapters.base import EngineSpec, Request, split_options
from adapters.lmdeploy.adapter import LmdeployAdapter
from adapters.lmdeploy.defaults import engine_defaults
from adapters.vllm.adapter import VllmAdapter

REQUEST = Request("r0", (1, 2, 3), 4)


def spec(tmp_path: Path) -> EngineSpec:
    config = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return EngineSpec("vllm", "reference", str(tmp_path), "bfloat16", str(tmp_path))


def test_namespaces() -> None:
    found = split_options(
        {
            "enable_prefix_caching": True,
            "sampling.top_k": 5,
            "env.LMDEPLOY_SKIP_WARMUP": False,
            "env.GONE": None,
            "hf_overrides": {"rms_norm_eps": 1e-3},
        }
    )
    assert found.engine == {"enable_prefix_caching": True, "hf_overrides": {"rms_norm_eps": 1e-3}}
    assert found.sampling == {"top_k": 5}
    assert found.env == {"LMDEPLOY_SKIP_WARMUP": "0", "GONE": None}


@pytest.mark.parametrize("name", ["", "sampling.", "env."])
def test_a_namespace_alone_is_no_option(name: str) -> None:
    with pytest.raises(ValueError, match="has no name"):
        split_options({name: 1})


def test_variables_are_set_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_TEST_GONE", "1")
    monkeypatch.setenv("ALIGN_TEST_NEW", "old")
    split_options({"env.ALIGN_TEST_GONE": None, "env.ALIGN_TEST_NEW": 7}).export()
    assert "ALIGN_TEST_GONE" not in os.environ
    assert os.environ["ALIGN_TEST_NEW"] == "7"


def test_lmdeploy_is_greedy_until_told_otherwise() -> None:
    adapter = LmdeployAdapter()
    plain = adapter._generation_config(REQUEST)
    assert (plain["do_sample"], plain["top_k"], plain["max_new_tokens"]) == (False, 1, 4)
    adapter._sampling = {"top_k": 5}
    drawn = adapter._generation_config(REQUEST)
    assert (drawn["do_sample"], drawn["top_k"], drawn["temperature"]) == (True, 5, 1.0)


def test_vllm_is_greedy_until_told_otherwise() -> None:
    adapter = VllmAdapter()
    assert adapter._sampling_params("k", REQUEST)["temperature"] == 0.0
    adapter._sampling = {"top_k": 5}
    drawn = adapter._sampling_params("k", REQUEST)
    assert (drawn["top_k"], drawn["temperature"], drawn["max_tokens"]) == (5, 1.0, 4)
    adapter._sampling = {"top_k": 5, "temperature": 0.3}
    assert adapter._sampling_params("k", REQUEST)["temperature"] == 0.3


def test_vllm_options_win_and_ascend_switches_are_merged(tmp_path: Path) -> None:
    overrides = {"block_size": 64, "additional_config": {"weight_nz_mode": 2}, "kv_cache_dtype": "auto"}
    arguments = VllmAdapter()._arguments(spec(tmp_path), overrides, object)
    assert arguments["block_size"] == 64 and arguments["kv_cache_dtype"] == "auto"
    assert arguments["additional_config"]["weight_nz_mode"] == 2
    assert arguments["additional_config"]["enable_mlapo"] is False
    assert arguments["enable_prefix_caching"] is False


def test_lmdeploy_options_win(tmp_path: Path) -> None:
    merged = {**engine_defaults(spec(tmp_path)), **split_options({"block_size": 64}).engine}
    assert (merged["block_size"], merged["dtype"]) == (64, "bfloat16")
