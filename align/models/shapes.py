"""Does the configuration describe these weights? An engine answers a contradiction with a stack trace."""

from __future__ import annotations

from collections.abc import Iterator

from safetensors import safe_open

from align.errors import UserError
from align.models.info import ModelInfo, check_weights

#: Dense architectures whose tensors are named and shaped as :func:`expected` says.
DENSE = ("Gemma2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: The same with a file's tensors for each expert; see :mod:`align.models.qwen_moe`.
WITH_EXPERTS = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
#: What the simulated NPU has all operators of.
SIMULATED_ARCHITECTURES = (*DENSE, *WITH_EXPERTS)


def architecture(info: ModelInfo) -> str:
    """The first architecture that config.json names, or ``unknown``."""
    named = info.config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "unknown"


def expected(info: ModelInfo) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """``(tensor, shape, fields of config.json it follows from)`` for the weights of every layer."""
    heads, kv = info.heads * info.head_dim, info.kv_heads * info.head_dim
    yield "model.embed_tokens.weight", (info.vocab_size, info.hidden), "vocab_size, hidden_size"
    for layer in range(info.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (info.hidden,), "num_hidden_layers, hidden_size"
        yield f"{at}.self_attn.q_proj.weight", (heads, info.hidden), "num_attention_heads, head_dim"
        yield f"{at}.self_attn.k_proj.weight", (kv, info.hidden), "num_key_value_heads, head_dim"
        yield f"{at}.self_attn.v_proj.weight", (kv, info.hidden), "num_key_value_heads, head_dim"
        if architecture(info) in DENSE:
            yield f"{at}.mlp.gate_proj.weight", (info.intermediate, info.hidden), "intermediate_size"
            continue
        experts, width = int(info.config.get("num_experts", 0)), int(info.config.get("moe_intermediate_size", 0))
        yield f"{at}.mlp.gate.weight", (experts, info.hidden), "num_experts, hidden_size"
        for expert in range(experts):
            yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (width, info.hidden), "moe_intermediate_size"
    yield "model.norm.weight", (info.hidden,), "hidden_size"


def check_shapes(info: ModelInfo) -> None:
    """Compare the headers of the weights with config.json; nothing is loaded.

    Raises:
        UserError: names the tensor, both shapes and the fields to look at.
    """
    if architecture(info) not in SIMULATED_ARCHITECTURES or info.config.get("quantization_config"):
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for file in check_weights(info.path):
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = tuple(weights.get_slice(name).get_shape())
    config = info.path / "config.json"
    for name, shape, fields in expected(info):
        found = shapes.get(name)
        if found != shape:
            what = "is not among the weights" if found is None else f"has shape {list(found)}"
            raise UserError(
                f"{config} does not describe the weights: {name} {what}, the configuration asks for {list(shape)}",
                f"correct {fields} in config.json, or fetch the weights that belong to it",
            )
    surplus = f"model.layers.{info.layers}.input_layernorm.weight"
    if surplus in shapes:
        raise UserError(
            f"{config} does not describe the weights: they have more layers than num_hidden_layers={info.layers}",
            "correct num_hidden_layers in config.json, or fetch the weights that belong to it",
        )
