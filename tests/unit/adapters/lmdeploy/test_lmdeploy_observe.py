"""Facts of lmdeploy's worker, from modules with the attributes of the engine's own classes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adapters.lmdeploy import observe

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM, LAYERS, BASE = 16, 32, 4, 2, 8, 3, 10000.0


class RMSNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.impl = SimpleNamespace(eps=eps)


class DlinferRotaryEmbeddingImpl(nn.Module):
    """Divides positions by its factor, as the engine's class does."""

    inv_freq: torch.Tensor

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.base, self.scaling_factor = BASE, factor
        exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float) / HEAD_DIM
        self.register_buffer("inv_freq", 1.0 / BASE**exponents)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() / self.scaling_factor * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def without_window(query: Any, key: Any, softmax_scale: Any) -> None:
    """A kernel like dlinfer's."""


def with_window(query: Any, key: Any, sliding_window: int, logit_softcapping: float) -> None:
    """A kernel that masks."""


def agent(*, tp: int = 1, window: int | None = None, kernel: Any = without_window, factor: float = 1.0) -> Any:
    model = nn.Module()
    model.embed_tokens = nn.Embedding(VOCAB, HIDDEN, dtype=torch.bfloat16)
    model.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16)
    model.get_input_embeddings = lambda: model.embed_tokens  # type: ignore[assignment]
    model.rotary_emb = DlinferRotaryEmbeddingImpl(factor)
    layers = []
    for _ in range(LAYERS):
        layer = nn.Module()
        layer.norm = RMSNorm(1e-6)
        layer.attn_fwd = nn.Module()
        layer.attn_fwd.impl = SimpleNamespace(  # type: ignore[assignment]
            num_heads=HEADS // tp,
            num_kv_heads=KV_HEADS // tp,
            head_size=HEAD_DIM,
            scale=HEAD_DIM**-0.5,
            sliding_window=window,
            logit_softcapping=0.0,
            paged_attention_fwd=kernel,
        )
        layer.gate_up_proj = nn.Linear(HIDDEN, 2 * 24 // tp, bias=False, dtype=torch.bfloat16)
        layer.gate_up_proj.tp = tp  # type: ignore[assignment]
        layers.append(layer)
    model.layers = nn.ModuleList(layers)
    cache = [(torch.zeros(5, 4, KV_HEADS // tp, HEAD_DIM, dtype=torch.bfloat16),) * 2 for _ in range(LAYERS)]
    return SimpleNamespace(
        rank=0,
        patched_model=SimpleNamespace(get_model=lambda: model),
        dist_config=SimpleNamespace(attn_tp=tp, dp=1, ep=1),
        backend_config=SimpleNamespace(eager_mode=True),
        cache_config=SimpleNamespace(window_size=-1 if window is None else window),
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        cache_engine=SimpleNamespace(gpu_cache=cache),
        model=model,
    )


def facts(target: Any) -> dict[str, Any]:
    return {fact.name: fact.value for fact in observe.worker_facts(target)}


@pytest.mark.parametrize("tp", [1, 2])
def test_sizes_are_of_the_whole_model(tp: int) -> None:
    found = facts(agent(tp=tp))
    assert found["heads"] == HEADS and found["heads_local"] == HEADS // tp
    sizes = {name: found[name] for name in ("kv_heads", "head_dim", "layers", "vocab", "hidden", "intermediate")}
    assert sizes == {
        "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "layers": LAYERS, "vocab": VOCAB, "hidden": HIDDEN,
        "intermediate": 24,
    }  # fmt: skip
    assert (found["parameter_dtype"], found["cache_dtype"], found["cache_block_size"]) == ("bfloat16", "bfloat16", 4)
    assert found["worker_tp"] == tp and "routing" not in found


def test_one_norm_with_another_eps_is_seen() -> None:
    target = agent()
    assert facts(target)["norm_eps"] == 1e-6
    target.model.layers[1].norm.impl.eps = 1e-5
    assert facts(target)["norm_eps"] == [1e-6, 1e-5]


def test_a_window_that_the_kernel_cannot_take_is_no_window() -> None:
    found = facts(agent(window=16))
    assert (found["window"], found["window_declared"], found["window_cache"]) == (0, 16, 16)
    found = facts(agent(window=16, kernel=with_window))
    assert (found["window"], found["window_declared"]) == (16, 16)
    assert facts(agent())["window_cache"] == 0


def test_frequencies_are_those_that_positions_are_turned_by() -> None:
    found = facts(agent(factor=4.0))
    expected = [BASE ** (-index / HEAD_DIM) / 4.0 for index in range(0, HEAD_DIM, 2)]
    assert found["rope_frequencies"]["inv_freq"] == pytest.approx(expected, rel=1e-6)
    assert (found["rope_theta"], found["rotary_dim"], found["rope_scaling"]) == (BASE, HEAD_DIM, "linear")


def test_a_tied_head_is_one_piece_of_memory() -> None:
    target = agent()
    assert facts(target)["tied_head"] is False
    target.model.lm_head.weight = target.model.embed_tokens.weight
    assert facts(target)["tied_head"] is True


def test_what_is_missing_is_unknown_and_the_rest_is_read() -> None:
    target = agent()
    target.cache_engine = None
    found = {fact.name: fact for fact in observe.worker_facts(target)}
    assert found["cache_residue"].value is None and "NoneType" in found["cache_residue"].why
    assert found["heads"].value == HEADS


def test_residue_and_dummies_before_the_first_step(tmp_path: Path) -> None:
    target = agent()
    target.cache_engine.gpu_cache[1][0][0, 2] = 1.0
    (tmp_path / "steps-rank0.jsonl").write_text('{"event": "dummy", "generation": 0}\n')
    found = {fact.name: fact.value for fact in observe.start_facts(target, tmp_path, 0)}
    # Keys and values of a layer are one tensor here, so what is written shows twice.
    assert found["start_residue"] == {"elements": 2 * KV_HEADS * HEAD_DIM, "blocks": 2, "of_blocks": 5 * 2 * LAYERS}
    assert found["dummy_forwards"] == 1


def sampling(**fields: Any) -> dict[str, Any]:
    defaults = {"max_top_k": 1, "top_k": None, "temperature": None, "top_p": None, "repetition_penalty": None}
    return {fact.name: fact.value for fact in observe.sampling_facts(SimpleNamespace(**{**defaults, **fields}))}


def test_sampling_as_the_worker_sees_it() -> None:
    assert sampling(temperature=torch.tensor([1.0, 1.0])) == {
        "greedy": True, "top_k": 1, "temperature": 1.0, "top_p": 1.0, "penalties": False,
    }  # fmt: skip
    drawn = sampling(max_top_k=5, top_k=torch.tensor([1, 5]), repetition_penalty=torch.tensor([[1.0], [1.25]]))
    assert (drawn["greedy"], drawn["top_k"], drawn["penalties"]) == (False, [1, 5], True)


def test_routing_of_a_model_with_experts() -> None:
    target = agent()
    target.model.layers[0].experts = nn.Module()
    target.model.layers[0].experts.impl = SimpleNamespace(num_experts=8, top_k=2, renormalize=True)
    assert facts(target)["routing"] == {"experts": 8, "top_k": 2, "renormalize": True}
