"""A dense model that computes like an engine and records what a probe would: input of the operator residual's tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adapters.base import RowSpan
from align.checkpoints import recompute
from align.checkpoints.table import Structure, structure_of
from tests.unit.align.checkpoints import eager

Tensor = torch.Tensor
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
#: The same as Gemma 2 computes: norms on both sides of a block that add 1 to their weights, a scaled embedding, GELU,
#: and scores that are not divided by the root of 16.
GEMMA: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["full_attention"] * 3,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 9,
    "tie_word_embeddings": False,
}


class DenseWeights:
    """Seeded weights by canonical kind; a dict that tests may write to."""

    def __init__(self, structure: Structure, dtype: torch.dtype) -> None:
        chance = torch.Generator().manual_seed(1)
        self.norm_offset = structure.norm_offset
        centre = 1 - structure.norm_offset

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=chance).div(math.sqrt(shape[-1])).to(dtype)

        q, kv = structure.heads * structure.head_dim, structure.kv_heads * structure.head_dim
        hidden, wide = structure.hidden, structure.intermediate
        linear = {"attn.q": (q, hidden), "attn.k": (kv, hidden), "attn.v": (kv, hidden), "attn.o": (hidden, q)}
        linear |= {"mlp.gate": (wide, hidden), "mlp.up": (wide, hidden), "mlp.down": (hidden, wide)}
        norms = {"attn_norm": hidden, "mlp_norm": hidden}
        if "sandwich" in structure.tags:
            norms |= {"attn.post_norm": hidden, "mlp.post_norm": hidden}
        if "qwen3" in structure.tags:
            norms |= {"attn.q_norm": structure.head_dim, "attn.k_norm": structure.head_dim}
        self.of: dict[tuple[str, int | None], Tensor] = {}
        self.biases: dict[tuple[str, int | None], Tensor] = {}
        for layer in range(structure.layers):
            self.of |= {(kind, layer): normal(*shape) for kind, shape in linear.items()}
            self.of |= {(kind, layer): centre + normal(size) for kind, size in norms.items()}
            self.biases[("attn.q", layer)] = normal(q)
        self.of[("embed", None)] = normal(structure.vocab, hidden) * 5
        self.of[("logits", None)] = normal(structure.vocab, hidden)
        self.of[("final_norm", None)] = centre + normal(hidden)

    def weight(self, kind: str, layer: int | None) -> Tensor | None:
        return self.of.get((kind, layer))

    def bias(self, kind: str, layer: int | None) -> Tensor | None:
        return self.biases.get((kind, layer))


@dataclass
class Recorded:
    """The arguments of ``ResidualPass.step``, without the phase."""

    rows: list[RowSpan]
    positions: Tensor
    token_ids: Tensor
    values: dict[str, Tensor]
    logits_rows: list[int]


@dataclass
class DenseEngine:
    """Runs steps of several requests and keeps their keys, in native or float32-internal numerics."""

    dtype: torch.dtype = torch.bfloat16
    native: bool = True
    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))

    def __post_init__(self) -> None:
        self.structure = structure_of(self.config)
        self.weights = DenseWeights(self.structure, self.dtype)
        self._cache: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._inverse, _ = recompute.rope_frequencies(self.structure.rope, self.structure.head_dim)

    def _norm(self, kind: str, layer: int | None, x: Tensor) -> Tensor:
        weight, offset = self.weights.of[(kind, layer)], self.structure.norm_offset
        if self.native:  # the sum with the offset is rounded too
            return eager.norm_native(x, weight + offset if offset else weight, self.structure.eps)
        return eager.norm_internal(x, weight.double() + offset, self.structure.eps).to(x.dtype)

    def _behind(self, kind: str, layer: int, x: Tensor, put: Callable[[str, Tensor], Tensor]) -> Tensor:
        """What a block adds to the residual stream."""
        return put(kind, self._norm(kind, layer, x)) if "sandwich" in self.structure.tags else x

    def _linear(self, kind: str, layer: int | None, x: Tensor) -> Tensor:
        weight, bias = self.weights.of[(kind, layer)], self.weights.bias(kind, layer)
        if self.native or bias is None:
            found = eager.linear_internal(x, weight)
            return found if bias is None else found + bias
        return (x.double() @ weight.double().T + bias.double()).to(x.dtype)

    def _attend(self, rows: Sequence[RowSpan], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = eager.attention_native if self.native else eager.attention_internal
        results, start = [], 0
        for span in rows:
            here = slice(start, start + span.count)
            keys, values = self._cache.get((span.request, layer), (k[:0], v[:0]))
            keys = torch.cat((keys[: span.start], k[here]))
            values = torch.cat((values[: span.start], v[here]))
            self._cache[(span.request, layer)] = keys, values
            at = torch.arange(span.start, span.start + span.count)
            results.append(kernel(q[here], at, keys, values, self.structure.scale, self.structure.window))
            start += span.count
        return torch.cat(results)

    def step(self, *rows: RowSpan, seed: int = 0) -> Recorded:
        """One forward over ``rows`` with random token ids."""
        structure = self.structure
        total = sum(span.count for span in rows)
        ids = torch.randint(0, structure.vocab, (total,), generator=torch.Generator().manual_seed(seed))
        at = torch.cat([torch.arange(span.start, span.start + span.count) for span in rows])
        found: dict[str, list[Tensor]] = {}

        def put(kind: str, tensor: Tensor) -> Tensor:
            found.setdefault(kind, []).append(tensor.clone())
            return tensor

        turn = eager.rope_native if self.native else eager.rope_internal
        if structure.activation == "silu":
            act = eager.silu_native if self.native else eager.silu_internal
        else:
            act = eager.gelu_tanh_native if self.native else eager.gelu_tanh_internal
        x = embed = self.weights.of[("embed", None)][ids]
        if structure.embed_scale != 1:
            x = embed * torch.tensor(structure.embed_scale, dtype=self.dtype)
        for layer in range(structure.layers):
            put("block_in", x)
            normal = put("attn_norm", self._norm("attn_norm", layer, x))
            q, k, v = (
                put(f"attn.{one}", self._linear(f"attn.{one}", layer, normal).view(total, -1, structure.head_dim))
                for one in "qkv"
            )
            if "qwen3" in structure.tags:
                q = put("attn.q_norm", self._norm("attn.q_norm", layer, q))
                k = put("attn.k_norm", self._norm("attn.k_norm", layer, k))
            q, k = put("attn.q_rope", turn(q, at, self._inverse)), put("attn.k_rope", turn(k, at, self._inverse))
            put("attn.key_states", k)
            put("attn.value_states", v)
            out = put("attn.out", self._attend(rows, layer, q, k, v))
            added = put("attn.o", self._linear("attn.o", layer, out.flatten(1)))
            x = put("mid", x + self._behind("attn.post_norm", layer, added, put))
            normal = put("mlp_norm", self._norm("mlp_norm", layer, x))
            gate, up = (put(f"mlp.{one}", self._linear(f"mlp.{one}", layer, normal)) for one in ("gate", "up"))
            added = put("mlp.down", self._linear("mlp.down", layer, put("mlp.act", act(gate, up))))
            x = x + self._behind("mlp.post_norm", layer, added, put)
        values = {kind: torch.stack(tensors) for kind, tensors in found.items()}
        ends = (torch.tensor([span.count for span in rows]).cumsum(0) - 1).tolist()
        final = self._norm("final_norm", None, x)
        logits = self._linear("logits", None, final[ends])
        values |= {"embed": embed, "final_in": x, "final_norm": final, "logits": logits}
        return Recorded(list(rows), at, ids, values, ends)
