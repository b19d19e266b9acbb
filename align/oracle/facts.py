"""What the oracle must know of a model beyond its structure, read from config.json as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from align.checkpoints.recompute import Routing
from align.checkpoints.routing import routing_of
from align.checkpoints.table import Structure

#: Model types whose rotary embedding pairs neighbouring channels (transformers' modeling files: ``x[..., 0::2]``).
INTERLEAVED = ("gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "ernie4_5", "ernie4_5_moe", "helium")
#: Architectures whose window counts only with ``use_sliding_window`` (their configuration classes drop it otherwise).
_SWITCHED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
#: Architectures with the window in every layer (its configuration class has no ``layer_types``).
_ALWAYS = ("MistralForCausalLM",)
#: Architectures without any window, whatever the file says.
_NEVER = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class Window:
    """The sliding window of one layer.

    Attributes:
        size: in tokens; ``None`` for none.
        why: if not empty, why it is not certain that the window applies. Rows that it could not hide anything from are
            judged all the same.
    """

    size: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Facts:
    """What operators need.

    Attributes:
        activation: of the MLP, a name of :data:`align.checkpoints.recompute.ACTIVATIONS` if it is known.
        scale: of the attention scores.
        softcap, logits_softcap: of the scores and of the logits; ``None`` for none.
        norm_offset: added to norm weights.
        rope: parameters; ``rope_why`` says why they cannot be used.
        interleaved: neighbouring channels are rotated together.
        windows: of each layer.
        routing: of the experts, ``None`` for dense models.
    """

    activation: str
    scale: float
    softcap: float | None
    logits_softcap: float | None
    norm_offset: float
    rope: Mapping[str, Any]
    rope_why: str
    interleaved: bool
    windows: tuple[Window, ...]
    routing: Routing | None


def facts_of(config: Mapping[str, Any], structure: Structure) -> Facts:
    """Read a configuration."""
    kind = str(config.get("model_type", ""))
    rope = dict(structure.rope)
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", float(config["partial_rotary_factor"]))
    by_layer = [key for key, value in rope.items() if isinstance(value, Mapping)]
    return Facts(
        activation=structure.activation,
        scale=structure.scale,
        softcap=_number(config.get("attn_logit_softcapping")),
        logits_softcap=_number(config.get("final_logit_softcapping")),
        norm_offset=structure.norm_offset,
        rope=rope,
        rope_why=f"the rope parameters differ by kind of layer ({', '.join(sorted(by_layer))})" if by_layer else "",
        interleaved=bool(config.get("rope_interleaved", kind in INTERLEAVED)),
        windows=tuple(_window(config, layer) for layer in range(structure.layers)),
        routing=routing_of(config),
    )


def _number(value: Any) -> float | None:
    return float(value) if value else None


def _window(config: Mapping[str, Any], layer: int) -> Window:
    """The rule of transformers' configuration classes: ``layer_types``, or for the Qwens layers from
    ``max_window_layers`` on."""
    named = (config.get("architectures") or ["unknown"])[0]
    size = config.get("sliding_window")
    if named in _NEVER or (named in _SWITCHED and not config.get("use_sliding_window", False)):
        return Window()
    types = config.get("layer_types")
    if types:
        if layer >= len(types):
            return Window(why=f"layer_types names {len(types)} layers, this is layer {layer}")
        if types[layer] == "full_attention":
            return Window()
        if types[layer] != "sliding_attention":
            return Window(why=f"attention of type {types[layer]} is not recomputed")
        if size is None:
            return Window(why="the layer is of type sliding_attention and the configuration has no sliding_window")
        return Window(int(size))
    if size is None or named in _ALWAYS:
        return Window(None if size is None else int(size))
    if named in _SWITCHED:
        return Window(int(size) if layer >= int(config.get("max_window_layers", 28)) else None)
    return Window(int(size), f"sliding_window is {size} and the configuration does not say for which layers")
