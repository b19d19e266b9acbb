"""The ``gemma2`` preset: a model whose attention scale is not ``1/sqrt(head_dim)``.

Computed as :mod:`align.models.qwen3` computes its weights. As in Gemma-2-27B a head has 128 channels and the scores are
divided by ``sqrt(144)``: an engine that takes the usual scale is 6 % off, which no operator complains about. All layers
see all keys and nothing is capped: dlinfer's kernels know neither windows nor soft caps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from align.models import qwen3
from align.models.cache import Say

#: What the scores are divided by the root of, in the place of the 128 channels of a head.
SCALAR = 144
#: Of the weights and the default prompts; chosen so that greedy output varies, and two tokens are nowhere near.
SEED = 18
#: About which value the weights of norms before and behind a block lie; they are added to 1. Those behind are large, as
#: trained ones are: else what a block adds would be small beside the embedding, and the head, which is the embedding
#: too, would repeat the last token for ever.
BEFORE, BEHIND = 0.0, 7.0
#: Only Qwen's configurations have these.
_QWEN_ONLY = ("hidden_act", "max_window_layers", "use_sliding_window")

CONFIG: dict[str, Any] = {
    **{key: value for key, value in qwen3.CONFIG.items() if key not in _QWEN_ONLY},
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["full_attention"] * qwen3.CONFIG["num_hidden_layers"],
    "model_type": "gemma2",
    # Without it the configuration class says 0, which is another token here.
    "pad_token_id": qwen3.PAD,
    "query_pre_attn_scalar": SCALAR,
    "rope_theta": 10000.0,
    # Not a large one: vllm 0.23.0 applies what stands here to all layers, whatever ``layer_types`` says.
    "sliding_window": None,
    "tie_word_embeddings": True,
}


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, as Gemma2ForCausalLM has them: norms on both sides of a block, no head."""
    for name, shape in qwen3.shapes(config):
        if name.endswith(("q_norm.weight", "k_norm.weight")) or name == "lm_head.weight":
            continue
        yield name, shape
        if name.endswith("post_attention_layernorm.weight"):
            layer = name.removesuffix("post_attention_layernorm.weight")
            yield f"{layer}pre_feedforward_layernorm.weight", shape
            yield f"{layer}post_feedforward_layernorm.weight", shape


def centre(name: str) -> float:
    """About which value the weights of the norm with this name lie."""
    return BEHIND if ".post_" in name else BEFORE


def build(folder: Path, say: Say) -> None:
    """Write the whole checkpoint into an existing empty ``folder``. Takes about a second, 7 MB."""
    qwen3.build(folder, say, SEED, CONFIG, shapes, centre)
