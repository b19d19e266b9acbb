"""Facts of vllm-ascend's worker, from modules with the attributes of the engine's own classes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adapters.vllm import observe

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS, BASE = 16, 32, 4, 2, 8, 3, 10000.0


class AscendRMSNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.variance_epsilon = eps


class AscendRotaryEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = BASE
        exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float) / HEAD_DIM
        angles = torch.arange(64.0)[:, None] / BASE**exponents
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1).bfloat16())


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the facts ask the engine's own modules."""
    size = SimpleNamespace(tp=1)
    state: Any = ModuleType("vllm.distributed.parallel_state")
    state.get_tp_group = lambda: SimpleNamespace(world_size=size.tp)
    state.get_dp_group = lambda: SimpleNamespace(world_size=1)
    distributed: Any = ModuleType("vllm.distributed")
    distributed.parallel_state = state
    distributed.get_tensor_model_parallel_world_size = lambda: size.tp
    ascend: Any = ModuleType("vllm_ascend.ascend_config")
    ascend.get_ascend_config = lambda: SimpleNamespace(weight_nz_mode=2, enable_mlapo=False)
    for name in ("vllm", "vllm_ascend"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (distributed, state, ascend):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return size


def runner(tp: int = 1, kv_replicas: int = 1, window: int | None = None, mode: int = 0) -> Any:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16)
    model.embed_tokens.org_vocab_size = VOCAB  # type: ignore[assignment]
    model.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16)
    rotary = AscendRotaryEmbedding()
    layers = []
    for _ in range(LAYERS):
        layer = nn.Module()
        layer.norm = AscendRMSNorm(1e-6)
        layer.rotary_emb = rotary
        layer.qkv_proj = nn.Module()
        layer.qkv_proj.num_kv_head_replicas = kv_replicas  # type: ignore[assignment]
        attention = nn.Module()
        attention.num_kv_heads = KV_HEADS * kv_replicas // tp  # type: ignore[assignment]
        attention.head_size = HEAD_DIM  # type: ignore[assignment]
        attention.impl = SimpleNamespace(  # type: ignore[assignment]
            num_heads=HEADS // tp,
            num_kv_heads=KV_HEADS * kv_replicas // tp,
            head_size=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            sliding_window=window,
        )
        layer.attn = attention
        layer.gate_up_proj = nn.Linear(HIDDEN, 2 * 24 // tp, bias=False, dtype=torch.bfloat16)
        layer.gate_up_proj.tp_size = tp  # type: ignore[assignment]
        layers.append(layer)
    model.layers = nn.ModuleList(layers)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_expert_parallel=False),
        model_config=SimpleNamespace(enforce_eager=True),
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=SimpleNamespace(name="NONE"), custom_ops=["all"]),
    )
    cache = (torch.zeros(5, 4, 1, HEAD_DIM, dtype=torch.bfloat16), torch.zeros(5, 4, 1, HEAD_DIM, dtype=torch.bfloat16))
    return SimpleNamespace(vllm_config=config, get_model=lambda: model, kv_caches=[cache] * LAYERS, model=model)


def facts(target: Any) -> dict[str, Any]:
    return {fact.name: fact.value for fact in observe.worker_facts(target)}


@pytest.mark.parametrize(("tp", "replicas"), [(1, 1), (2, 1), (4, 2)])
def test_sizes_are_of_the_whole_model(engine: SimpleNamespace, tp: int, replicas: int) -> None:
    engine.tp = tp
    found = facts(runner(tp, replicas))
    sizes = {name: found[name] for name in ("heads", "kv_heads", "head_dim", "layers", "vocab", "hidden")}
    assert sizes == {
        "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "layers": LAYERS, "vocab": VOCAB, "hidden": HIDDEN,
    }  # fmt: skip
    assert (found["intermediate"], found["worker_tp"]) == (24, tp)
    assert (found["parameter_dtype"], found["cache_dtype"], found["cache_block_size"]) == ("bfloat16", "bfloat16", 4)


def test_a_compiled_model_is_not_eager() -> None:
    assert facts(runner())["worker_eager"] is True
    assert facts(runner(mode=3))["worker_eager"] is False


def test_switches_of_the_plugin_are_read_and_absent_ones_named() -> None:
    switches = facts(runner())["ascend_config"]
    assert switches["weight_nz_mode"] == 2 and switches["enable_mlapo"] is False
    assert switches["enable_flashcomm1"] == "not there"


def test_frequencies_come_out_of_the_table() -> None:
    found = facts(runner())
    expected = [BASE ** (-index / HEAD_DIM) for index in range(0, HEAD_DIM, 2)]
    measured = found["rope_frequencies"]
    for have, want, resolution in zip(measured["inv_freq"], expected, measured["resolution"], strict=True):
        assert abs(have / want - 1) <= resolution
    assert (found["rope_theta"], found["rotary_dim"], found["rope_scaling"]) == (BASE, HEAD_DIM, "default")


def test_two_tables_are_no_answer() -> None:
    target = runner()
    target.model.layers[1].rotary_emb = AscendRotaryEmbedding()
    found = {fact.name: fact for fact in observe.worker_facts(target)}
    assert found["rope_theta"].value is None and "2 rotary embeddings" in found["rope_theta"].why
    assert found["heads"].value == HEADS


def test_windows_and_eps_of_single_layers_are_seen() -> None:
    target = runner(window=16)
    assert facts(target)["window"] == 16
    target.model.layers[2].attn.impl.sliding_window = None
    target.model.layers[0].norm.variance_epsilon = 1e-5
    found = facts(target)
    assert (found["window"], found["norm_eps"]) == ([0, 16], [1e-6, 1e-5])


def test_residue_and_dummies(tmp_path: Path) -> None:
    target = runner()
    target.kv_caches = [(torch.zeros(5, 4, 1, 2), torch.zeros(5, 4, 1, 2))]
    target.kv_caches[0][1][3] = -1.0
    found = {fact.name: fact.value for fact in observe.start_facts(target, tmp_path, 0)}
    assert found == {"start_residue": {"elements": 8, "blocks": 1, "of_blocks": 10}, "dummy_forwards": 0}


def test_sampling_as_the_worker_sees_it() -> None:
    plain = SimpleNamespace(all_greedy=True, temperature=None, top_k=None, top_p=None, no_penalties=True)
    assert {fact.name: fact.value for fact in observe.sampling_facts(plain)} == {
        "greedy": True, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "penalties": False,
    }  # fmt: skip
    drawn = SimpleNamespace(
        all_greedy=False,
        temperature=torch.tensor([0.5, 0.5]),
        top_k=torch.tensor([5, 7]),
        top_p=None,
        no_penalties=False,
    )
    found = {fact.name: fact.value for fact in observe.sampling_facts(drawn)}
    assert (found["greedy"], found["temperature"], found["top_k"], found["penalties"]) == (False, 0.5, [5, 7], True)


def test_routing_of_a_model_with_experts() -> None:
    target = runner()
    experts = nn.Module()
    experts.top_k, experts.renormalize, experts.global_num_experts = 2, True, 8  # type: ignore[assignment]
    target.model.layers[0].experts = experts
    assert facts(target)["routing"] == {"experts": 8, "top_k": 2, "renormalize": True}
