"""Mixture of experts against transformers' Qwen3-MoE and DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from align.checkpoints import recompute
from align.checkpoints.bounds import bounds, unit_roundoff
from align.checkpoints.recompute import Routing
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
ROUTING = Routing(experts=8, top_k=3)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def qwen3(renormalize: bool = True) -> Any:
    return Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=renormalize,
        experts_implementation="eager",
    )


@pytest.mark.parametrize("renormalize", [True, False])
def test_choice_and_weights_are_those_of_qwen3(renormalize: bool) -> None:
    router = Qwen3MoeTopKRouter(qwen3(renormalize)).bfloat16()
    router.weight.data = normal(8, 32, seed=1)
    x = normal(40, 32)
    logits = torch.nn.functional.linear(x, router.weight).detach()
    with torch.no_grad():
        _, weights, ids = router(x)
    routing = Routing(experts=8, top_k=3, renormalize=renormalize)
    assert float(recompute.choice_excess(logits, ids, routing, torch.bfloat16).max()) <= 1
    found = recompute.expert_weights(logits, ids, routing, torch.float64)
    torch.testing.assert_close(found.value.gather(1, ids), weights.double(), rtol=1e-5, atol=1e-7)
    assert torch.equal((found.value > 0).sum(1), torch.full((40,), 3))


def deepseek() -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=16,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        n_shared_experts=1,
    )
    module = DeepseekV3MoE(config)
    module.gate.weight.data = normal(16, 32, dtype=torch.float32, seed=3)
    module.gate.e_score_correction_bias.data = normal(16, dtype=torch.float32, seed=4, scale=0.2).abs()
    return module


GROUPED = Routing(16, 4, "sigmoid", True, 2.5, groups=4, kept_groups=2, group_score="best two")


def test_grouped_choice_with_a_bias_is_that_of_deepseek() -> None:
    module, x = deepseek(), normal(200, 32, dtype=torch.float32)
    logits = module.gate(x)
    ids, weights = module.route_tokens_to_experts(logits)
    bias = module.gate.e_score_correction_bias
    logits, weights, bias = logits.detach(), weights.detach(), bias.detach()
    excess = recompute.choice_excess(logits, ids, GROUPED, torch.float32, bias)
    assert float(excess.max()) <= 1
    found = recompute.expert_weights(logits, ids, GROUPED, torch.float64)
    torch.testing.assert_close(found.value.gather(1, ids), weights.double(), rtol=1e-5, atol=1e-7)
    # The best experts whatever their group are another choice, and seen as such; so is the choice without the bias.
    anywhere = (logits.sigmoid() + bias).topk(4).indices
    assert not bool((anywhere.sort().values == ids.sort().values).all())
    assert float(recompute.choice_excess(logits, anywhere, GROUPED, torch.float32, bias).max()) > 100
    assert float(recompute.choice_excess(logits, ids, GROUPED, torch.float32).max()) > 100


def test_a_wrong_choice_is_counted_in_roundings() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).bfloat16()
    routing = Routing(experts=4, top_k=2)
    assert float(recompute.choice_excess(logits, torch.tensor([[1, 0]]), routing, torch.bfloat16).max()) == 0
    p = logits.double().softmax(-1)[0]
    found = recompute.choice_excess(logits, torch.tensor([[0, 2]]), routing, torch.bfloat16)
    assert float(found[0, 0]) == 0
    assert float(found[0, 1]) == pytest.approx(float((p[1] - p[2]) / (2**-8 * (p[1] + p[2]))), rel=1e-6)
    for ids in ([[0, 0]], [[0, 4]], [[-1, 0]]):
        assert float(recompute.choice_excess(logits, torch.tensor(ids), routing, torch.bfloat16).max()) == torch.inf


def test_equal_scores_may_be_chosen_either_way() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0]]).bfloat16()
    for ids in ([[0]], [[1]]):
        assert float(recompute.choice_excess(logits, torch.tensor(ids), Routing(3, 1), torch.bfloat16).max()) == 0


def test_weights_of_ids_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 9, there are 8"):
        recompute.expert_weights(normal(1, 8), torch.tensor([[0, 9, 1]]), ROUTING)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(eager.DTYPES), st.booleans())
def test_rounded_routers_stay_within_their_bounds(seed: int, dtype: torch.dtype, renormalize: bool) -> None:
    """A router that keeps its scores in the model's dtype, and chooses by them."""
    logits = normal(32, 8, dtype=dtype, seed=seed, scale=2.0)
    scores = logits.softmax(-1)
    values, ids = scores.topk(3)
    if renormalize:
        values = values / values.sum(-1, keepdim=True)
    values = values * 2.5
    routing, unit = Routing(8, 3, renormalize=renormalize, scale=2.5), unit_roundoff(dtype) * 1.02
    excess = recompute.choice_excess(logits, ids, routing, dtype)
    assert float(excess.max()) <= bounds()["topk_ids"].max_roundings * 1.02
    exact = recompute.expert_weights(logits, ids, routing, torch.float64)
    error = (values.double() - exact.value.gather(1, ids)).abs() / exact.magnitude.gather(1, ids)
    assert float(error.max()) <= bounds()["topk_weights"].max_roundings * unit


def matrices(hidden: int, inner: int, count: int, dtype: torch.dtype, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        (
            normal(inner, hidden, dtype=dtype, seed=seed + 3 * index, scale=hidden**-0.5),
            normal(inner, hidden, dtype=dtype, seed=seed + 3 * index + 1, scale=hidden**-0.5),
            normal(hidden, inner, dtype=dtype, seed=seed + 3 * index + 2, scale=inner**-0.5),
        )
        for index in range(count)
    ]


def qwen3_experts(given: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype) -> Any:
    hidden, inner = given[0][2].shape
    config = qwen3()
    config.hidden_size, config.moe_intermediate_size, config.num_experts = hidden, inner, len(given)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config).to(dtype)
    module.gate_up_proj.data = torch.stack([torch.cat((gate, up)) for gate, up, _ in given]).to(dtype)
    module.down_proj.data = torch.stack([down for _, _, down in given]).to(dtype)
    return module.requires_grad_(False)


def test_the_mix_is_that_of_qwen3() -> None:
    given, x = matrices(32, 16, 8, torch.bfloat16, 10), normal(20, 32)
    logits = normal(20, 8, seed=5)
    ids = logits.topk(3).indices
    weights = recompute.expert_weights(logits, ids, ROUTING, torch.float64).value
    asked = []

    def expert(index: int) -> tuple[Tensor, Tensor, Tensor]:
        asked.append(index)
        return given[index]

    found = recompute.expert_mix(x, ids, weights, expert, compute=torch.float64)
    wanted = qwen3_experts(given, torch.float64)(x.double(), ids, weights.gather(1, ids))
    torch.testing.assert_close(found.value, wanted, rtol=1e-9, atol=1e-12)
    assert asked == sorted(set(ids.flatten().tolist()))
    assert bool((found.magnitude >= found.value.abs()).all())


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(eager.DTYPES),
    st.sampled_from([(32, 16, 8, 3), (256, 64, 4, 1), (64, 128, 16, 8)]),
)
def test_right_mixes_stay_within_the_bound(seed: int, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    hidden, inner, count, top_k = sizes
    given, x = matrices(hidden, inner, count, dtype, seed), normal(16, hidden, dtype=dtype, seed=seed + 999)
    logits = normal(16, count, dtype=dtype, seed=seed + 998)
    ids = logits.topk(top_k).indices
    routing = Routing(count, top_k)
    weights = recompute.expert_weights(logits, ids, routing).value.to(dtype)
    exact = recompute.expert_mix(x, ids, weights, given.__getitem__, compute=torch.float64)
    limit = bounds()["expert_mix"].max_roundings * unit_roundoff(dtype) * 1.02
    native = qwen3_experts(given, dtype)(x, ids, weights.gather(1, ids))
    single = qwen3_experts(given, torch.float32)(x.float(), ids, weights.float().gather(1, ids)).to(dtype)
    for kernel in (native, single):
        assert float(((kernel.double() - exact.value).abs() / exact.magnitude).max()) <= limit
    alone = recompute.gated_mlp(x, *given[0], compute=torch.float64)
    apply, (gate, up, down) = torch.nn.functional.linear, given[0]
    native = apply(torch.nn.functional.silu(apply(x, gate)) * apply(x, up), down)
    error = (native.double() - alone.value).abs() / alone.magnitude
    assert float(error.max()) <= bounds()["gated_mlp"].max_roundings * unit_roundoff(dtype) * 1.02


@pytest.mark.parametrize("wrong", ["swapped", "one expert too large"])
def test_wrong_experts_are_beyond_the_bound(wrong: str) -> None:
    given, x = matrices(64, 32, 8, torch.bfloat16, 0), normal(16, 64)
    logits = normal(16, 8, seed=5)
    ids = logits.topk(2).indices
    weights = recompute.expert_weights(logits, ids, Routing(8, 2)).value.bfloat16()
    exact = recompute.expert_mix(x, ids, weights, given.__getitem__, compute=torch.float64)
    changed = list(given)
    if wrong == "swapped":
        changed[0], changed[1] = given[1], given[0]
    else:
        changed[0] = (given[0][0], given[0][1], given[0][2] * 1.25)
    kernel = qwen3_experts(changed, torch.bfloat16)(x, ids, weights.gather(1, ids))
    limit = bounds()["expert_mix"].max_roundings * 2**-8 * 1.02
    assert float(((kernel.double() - exact.value).abs() / exact.magnitude).max()) > 1.5 * limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gated_sum_in_the_models_dtype_is_within_its_bound(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    a, b = (torch.randn(64, 96, generator=generator).to(dtype) for _ in range(2))
    gate = torch.randn(64, 1, generator=generator).to(dtype)
    exact = recompute.gated_add(a, b, gate, torch.float64)
    expected = a.double() + b.double() / (1 + (-gate.double()).exp())
    assert torch.allclose(exact.value, expected, rtol=1e-12, atol=1e-12)
    eager = a + torch.sigmoid(gate) * b
    allowed = bounds()["gated_add"].max_roundings * unit_roundoff(dtype) * exact.magnitude
    assert bool(((eager.double() - exact.value).abs() <= allowed).all())
    wrong = a + b
    assert not bool(((wrong.double() - exact.value).abs() <= allowed).all()), "a gate that was left out is seen"


@pytest.mark.parametrize("wrong", ["", "left out", "of the experts' result", "given to expert 0"])
def test_zero_experts_hand_their_token_on(wrong: str) -> None:
    """Seed 000: original_input * weight is added behind the experts; their ids go to no expert."""
    given, x = matrices(32, 16, 6, torch.bfloat16, 0), normal(24, 32)
    ids = normal(24, 8, seed=7).float().topk(3).indices  # 6 experts and 2 zero experts
    weights = torch.zeros(24, 8).scatter_(1, ids, torch.rand(24, 3, generator=torch.Generator().manual_seed(2)))
    exact = recompute.expert_mix(x, ids, weights, given.__getitem__, compute=torch.float64, first_zero=6)
    shares = weights.gather(1, ids).double()
    zero = ids >= 6
    assert bool(zero.any())
    experts = qwen3_experts(given, torch.float64)
    routed = experts(x.double(), ids.masked_fill(zero, 0), shares.masked_fill(zero, 0.0))
    identity = (shares * zero).sum(1, keepdim=True)
    whole = {
        "": routed + identity * x.double(),
        "left out": routed,
        "of the experts' result": routed + identity * routed,
        "given to expert 0": experts(x.double(), ids.masked_fill(zero, 0), shares),
    }[wrong]
    limit = bounds()["expert_mix"].max_roundings * 2**-8 * 1.02
    error = float(((whole - exact.value).abs() / exact.magnitude).max())
    if wrong:
        assert error > 1.5 * limit
    else:
        torch.testing.assert_close(whole, exact.value, rtol=1e-9, atol=1e-12)
