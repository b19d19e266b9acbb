"""Every checkpoint of a model out of transformers, in canonical form, from one forward over a whole sequence.

Modules are watched from outside with hooks, the attention function where the model's own file calls it: queries and
keys after the rotation exist nowhere else. Nothing is computed a second time but the logits of routers, of which
transformers hands on the softmax alone.

A router follows the experts that it is given (:attr:`Watcher.experts`): where two scores are as near as rounding makes
them, its own choice says nothing about who is right, and everything behind would be another computation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from align.checkpoints.table import Structure

Tensor = torch.Tensor
#: What a model without paged cache and without ranks does not have, with the reason.
ABSENT = {
    "attn.kv_start_indices": "golden has no cache slots",
    "attn.o_partial": "golden runs on one rank",
    "mlp.down_partial": "golden runs on one rank",
    "moe.topk_ids": "golden follows the experts that both sides used",
}
#: Module below a layer → checkpoint of its result.
_RESULTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "self_attn.o_proj": "attn.o",
    "post_attention_layernorm": "mlp_norm",
}
_DENSE = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
_EXPERTS = {"mlp.experts": "moe.routed", "mlp": "moe.out"}
_SHARED = {"mlp.shared_expert": "moe.shared", "mlp.shared_expert_gate": "moe.shared_gate"}
#: Of models with a norm before and behind each block, in the place of ``post_attention_layernorm`` above.
_SANDWICH = {
    "post_attention_layernorm": "attn.post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp.post_norm",
}
#: Module below a layer → checkpoint of what it is given.
_GIVEN = {"": "block_in", "post_attention_layernorm": "mid"}
_SANDWICH_GIVEN = {"": "block_in", "pre_feedforward_layernorm": "mid"}
_DENSE_GIVEN = {"mlp.down_proj": "mlp.act"}
_ATTENTION = "eager_attention_forward"


class Watcher:
    """Collects the checkpoints of one forward; use it while the forward runs.

    Args:
        model: of ``AutoModelForCausalLM``, with eager attention.
        structure: of the model, on one rank.

    Attributes:
        experts: by layer, the experts that its router is to choose, int64 ``[T, top_k]``; a row of −1 leaves the choice
            to the router, and so does a layer that is not in it.

    Raises:
        ValueError: the model is not built as the known ones are; names what is missing.
    """

    def __init__(self, model: Any, structure: Structure) -> None:
        self._model, self._structure = model, structure
        self._found: dict[str, Tensor] = {}
        self.experts: Mapping[int, Tensor] = {}
        self._layer_of: dict[int, int] = {}
        layers = getattr(getattr(model, "model", None), "layers", None)
        if layers is None or len(layers) != structure.layers:
            raise ValueError(f"{type(model).__name__} has no model.layers of {structure.layers} layers")

    def __enter__(self) -> Watcher:
        self._stack = ExitStack()
        try:
            self._watch()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self) -> Mapping[str, Tensor]:
        """What the last forward over ``T`` tokens gave, by checkpoint: ``[T, …]`` in the model's dtype, contiguous."""
        found, self._found = self._found, {}
        return found

    def _watch(self) -> None:
        core = self._model.model
        self._embedding(core.embed_tokens)
        self._before(core.norm, "final_in")
        self._after(core.norm, "final_norm")
        self._after(self._model.lm_head, "logits")
        for index, layer in enumerate(core.layers):
            at = f"layers.{index}."
            routed = _below(layer, "mlp.experts") is not None
            shared = routed and _below(layer, "mlp.shared_expert") is not None
            sandwich = "sandwich" in self._structure.tags
            results = {**_RESULTS, **(_EXPERTS if routed else _DENSE), **(_SHARED if shared else {})}
            results |= _SANDWICH if sandwich else {}
            for path, kind in results.items():
                module = _below(layer, path)
                if module is not None:
                    self._after(module, at + kind)
                elif not path.endswith(("q_norm", "k_norm")):
                    raise ValueError(f"layer {index} of {type(self._model).__name__} has no {path}")
            given = _SANDWICH_GIVEN if sandwich else _GIVEN
            for path, kind in (given if routed else {**given, **_DENSE_GIVEN}).items():
                self._before(_below(layer, path), at + kind)
            if routed:
                self._route(_below(layer, "mlp.gate"), index)
            self._layer_of[id(layer.self_attn)] = index
        self._stack.enter_context(_replaced(sys.modules[type(core.layers[0].self_attn).__module__], self._attend))

    def _embedding(self, module: Any) -> None:
        """Watch the embedding; one that scales its rows (transformers 5's Gemma) hands on what it has read before."""
        if not hasattr(module, "embed_scale"):
            self._after(module, "embed")
            return

        def hook(module: Any, args: Sequence[Any], _: Any) -> None:
            self._keep("embed", torch.nn.functional.embedding(args[0], module.weight))

        self._stack.callback(module.register_forward_hook(hook).remove)

    def _after(self, module: Any, name: str) -> None:
        handle = module.register_forward_hook(lambda _, __, result: self._keep(name, result))
        self._stack.callback(handle.remove)

    def _before(self, module: Any, name: str) -> None:
        def hook(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            self._keep(name, args[0] if args else kwargs["hidden_states"])

        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        self._stack.callback(handle.remove)

    def _route(self, gate: Any, layer: int) -> None:
        """Watch a router, whose result is ``(softmax, weights, ids)``, and let it follow the given experts."""
        if gate is None or not hasattr(gate, "weight"):
            raise ValueError(f"layer {layer} of {type(self._model).__name__} has experts, and no router with a weight")

        def hook(module: Any, args: Sequence[Any], result: tuple[Tensor, Tensor, Tensor]) -> Any:
            scores, weights, ids = result
            self._keep(f"layers.{layer}.moe.router_logits", torch.nn.functional.linear(args[0], module.weight))
            given = self.experts.get(layer)
            if given is not None:
                ids = torch.where(given < 0, ids, given)
                weights = scores.gather(-1, ids)
                if getattr(module, "norm_topk_prob", False):
                    weights = weights / weights.sum(-1, keepdim=True)
            by_expert = torch.zeros_like(scores).scatter(-1, ids, weights)
            self._keep(f"layers.{layer}.moe.topk_weights", by_expert)
            return scores, weights, ids

        handle = gate.register_forward_hook(hook)
        self._stack.callback(handle.remove)

    def _keep(self, name: str, value: Tensor) -> None:
        """``[1, T, …]``, or ``[T, C]`` of what has no batch, to ``[T, …]``; projections are split into heads."""
        rows = value.detach()
        rows = rows[0] if rows.dim() > 2 else rows
        if name.endswith((".attn.q", ".attn.k", ".attn.v")):
            rows = rows.reshape(rows.shape[0], -1, self._structure.head_dim)
        # Modules may hand on what they were given, and the next one may write into it.
        self._found[name] = rows.clone(memory_format=torch.contiguous_format)

    def _attend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(module, query, key, value, *args, **kwargs)
            layer = self._layer_of.get(id(module))
            if layer is not None:
                at = f"layers.{layer}.attn."
                for kind, heads in (("q_rope", query), ("k_rope", key), ("key_states", key), ("value_states", value)):
                    self._keep(at + kind, heads.transpose(1, 2))
                self._keep(at + "out", result[0])
            return result

        return attend


def fill_window(config: Any) -> None:
    """Let transformers 5 run a configuration without a window whose layers are all ``full_attention``.

    Its Gemma 2 makes a mask for sliding layers all the same, which needs a number and which no layer reads.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds == {"full_attention"} and getattr(config, "sliding_window", 0) is None:
        config.sliding_window = config.max_position_embeddings


def _below(module: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        module = getattr(module, part, None)
    return module


@contextmanager
def _replaced(module: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """The module's eager attention, watched; others of the same architecture call it too while this holds."""
    original = getattr(module, _ATTENTION, None)
    if original is None:
        raise ValueError(f"{module.__name__} has no {_ATTENTION}")
    setattr(module, _ATTENTION, around(original))
    try:
        yield
    finally:
        setattr(module, _ATTENTION, original)
