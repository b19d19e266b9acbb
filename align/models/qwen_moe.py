"""The presets with experts: ``qwen3-moe``, and ``qwen2-moe``, whose layers have a shared expert too.

Both are tiny, and computed as :mod:`align.models.qwen3` computes its weights. ``qwen2-moe`` is the family with shared
experts whose routing lmdeploy 0.12.2 with dlinfer 0.2.7 and vllm 0.23.0 mean alike and that needs no latent attention:
lmdeploy routes glm4_moe by a softmax without its correction bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from align.models import qwen3
from align.models.cache import Say

#: Experts of a layer, how many a token goes to, and the width of each.
EXPERTS, CHOSEN, WIDTH = 8, 2, 256

_ROUTED: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}

QWEN3_MOE_CONFIG: dict[str, Any] = {
    **qwen3.CONFIG,
    **_ROUTED,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
}

#: As in Qwen1.5-MoE: biases of q, k and v, weights that are not renormalised, a shared expert with a gate of its own.
QWEN2_MOE_CONFIG: dict[str, Any] = {
    **{key: value for key, value in qwen3.CONFIG.items() if key not in ("attention_bias", "head_dim")},
    **_ROUTED,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "norm_topk_prob": False,
    "qkv_bias": True,
    "shared_expert_intermediate_size": 384,
}


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, as the files of Qwen3-MoE and Qwen1.5-MoE have them."""
    hidden, width, shared = config["hidden_size"], config["moe_intermediate_size"], "shared_expert_intermediate_size"
    biased = config["model_type"] == "qwen2_moe"
    for name, shape in qwen3.shapes({"head_dim": hidden // config["num_attention_heads"], **config}):
        layer, _, rest = name.partition(".mlp.")
        if not rest:
            if not (biased and name.endswith(("q_norm.weight", "k_norm.weight"))):
                yield name, shape
            if biased and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                yield name.removesuffix("weight") + "bias", shape[:1]
        elif rest == "gate_proj.weight":  # the layer's dense MLP gives way to the experts
            yield f"{layer}.mlp.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from _gated(f"{layer}.mlp.experts.{expert}", hidden, width)
            if shared in config:
                yield from _gated(f"{layer}.mlp.shared_expert", hidden, config[shared])
                yield f"{layer}.mlp.shared_expert_gate.weight", (1, hidden)


def _gated(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def build_qwen3_moe(folder: Path, say: Say) -> None:
    """Write the whole checkpoint into an existing empty ``folder``. Takes about a second, 16 MB."""
    qwen3.build(folder, say, config=QWEN3_MOE_CONFIG, parameters=shapes)


def build_qwen2_moe(folder: Path, say: Say) -> None:
    """Write the whole checkpoint into an existing empty ``folder``. Takes about a second, 18 MB."""
    qwen3.build(folder, say, config=QWEN2_MOE_CONFIG, parameters=shapes)
