"""The table of canonical checkpoints, read from ``table.tsv``, which is its only home.

A *kind* is one row (``attn.q``); a *name* is a kind at a layer (``layers.3.attn.q``). Rows stand in the order in which
a model computes them, so that sorting by :attr:`Name.order` puts a cause before its effects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

#: Names of the activation that the table's ``silu_mul`` stands for.
SILU = ("silu", "swish")
#: What adds up the ranks' parts of the experts' results, and what shared experts add.
EXPERT_SUM = "expert_sum"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_PREFIX = "layers.{i}."
#: Architecture → tags that select its rows. Families of the table that name models appear as they are.
#: ``sandwich``: a norm before and behind each block, and ``post_attention_layernorm`` is the one behind attention.
ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "Gemma2ForCausalLM": ("all", "gqa", "dense", "sandwich"),
    "LlamaForCausalLM": ("all", "gqa", "dense"),
    "MistralForCausalLM": ("all", "gqa", "dense"),
    "Qwen2ForCausalLM": ("all", "gqa", "dense"),
    "Qwen3ForCausalLM": ("all", "gqa", "dense", "qwen3"),
    "Qwen2MoeForCausalLM": ("all", "gqa", "moe", "shared_experts", "gated_shared_experts"),
    "Qwen3MoeForCausalLM": ("all", "gqa", "moe", "qwen3_moe"),
}
#: Architectures whose norms multiply with ``1 + weight`` and whose embedding is scaled by ``sqrt(hidden)``, and what
#: their configuration class reads where a file is silent.
_GEMMAS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
}
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
#: Architectures without any window, whatever the file says, and with one in every layer.
_NEVER_SLIDE, _ALWAYS_SLIDE = ("LlamaForCausalLM",), ("MistralForCausalLM",)
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Kind:
    """One row of the table.

    Attributes:
        name: without the layer, ``attn.q``.
        per_layer: whether every layer has one.
        axes: names of the canonical shape's axes; the first is ``tokens`` (``requests`` for the logits).
        shard: the axis that tensor parallelism splits, ``partial`` if ranks hold summands, or ``""`` if every rank
            holds the whole.
        families: tags of which a model needs one.
        exists_when: condition in words.
        stage: ``embedding``, ``norm``, ``attention``, ``mlp``, ``residual`` or ``head``.
        operators: what produces it; the second, if any, under tensor parallelism.
        inputs: alternatives per argument, see :meth:`Structure.inputs`.
        meaning: what exactly, and how it is rounded.
        index: place in the table.
    """

    name: str
    per_layer: bool
    axes: tuple[str, ...]
    shard: str
    families: tuple[str, ...]
    exists_when: str
    stage: str
    operators: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    meaning: str
    index: int

    def at(self, layer: int | None) -> str:
        """The name at a layer."""
        assert (layer is not None) == self.per_layer, f"{self.name} at layer {layer}"
        return self.name if layer is None else f"layers.{layer}.{self.name}"

    @property
    def always(self) -> bool:
        """Whether values are kept whatever is asked for: what is compared exactly, and what such a choice rests on."""
        return self.integer or self.name == "moe.router_logits"

    @property
    def integer(self) -> bool:
        """Whether values are ids or indices, which are compared exactly."""
        return self.name in ("attn.kv_start_indices", "moe.topk_ids")


@dataclass(frozen=True)
class Name:
    """A kind at a layer; ``layer`` is ``None`` for what exists once."""

    kind: Kind
    layer: int | None

    def __str__(self) -> str:
        return self.kind.at(self.layer)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts names as a model computes them."""
        if self.layer is not None:
            return (self.layer, self.kind.index)
        return (-1 if self.kind.name == "embed" else 1 << 30, self.kind.index)


@lru_cache(maxsize=1)
def kinds() -> Mapping[str, Kind]:
    """All rows of the table, by name, in order."""
    lines = Path(__file__).with_name("table.tsv").read_text(encoding="utf-8").splitlines()
    fields = lines[0].split("\t")
    found: dict[str, Kind] = {}
    for index, line in enumerate(lines[1:]):
        row = dict(zip(fields, line.split("\t"), strict=True))
        per_layer = row["name"].startswith(_PREFIX)
        name = row["name"].removeprefix(_PREFIX)
        found[name] = Kind(
            name=name,
            per_layer=per_layer,
            axes=tuple(row["axes"].split(",")),
            shard=row["shard"],
            families=tuple(row["families"].split(",")),
            exists_when=row["exists_when"],
            stage=row["stage"],
            operators=tuple(row["operator"].split("|")),
            inputs=tuple(tuple(argument.split("|")) for argument in row["inputs"].split(",") if argument),
            meaning=row["meaning"],
            index=index,
        )
    return found


def parse(name: str) -> Name:
    """``layers.3.attn.q`` → kind and layer.

    Raises:
        ValueError: no checkpoint has this name.
    """
    match = _LAYER.fullmatch(name)
    layer, rest = (None, name) if match is None else (int(match[1]), match[2])
    kind = kinds().get(rest)
    if kind is None or kind.per_layer != (layer is not None):
        raise ValueError(f"{name!r} is not a checkpoint; see the table in align/checkpoints/table.tsv")
    return Name(kind, layer)


@dataclass(frozen=True)
class Structure:
    """Which checkpoints a model has, and the sizes of their axes.

    Attributes:
        tags: see :data:`ARCHITECTURES`.
        layers, hidden, heads, kv_heads, head_dim, vocab: sizes of the whole model.
        intermediate: width of the MLP, of a model with experts that of one expert.
        experts, topk: of how many experts of a layer how many compute a token; 0 for dense models.
        shared: width of the shared experts together; 0 for none.
        tp: tensor-parallel size; rows that exist under tensor parallelism alone depend on it.
        dp, ep: data-parallel groups and expert-parallel size, as in :class:`align.layout.Layout`.
        eps: of every RMS norm.
        rope: the configuration's rope parameters, as transformers normalises them (``rope_theta``, ``rope_type``, …).
        scale: of the attention scores.
        window: sliding window in tokens, ``None`` for none.
        activation: of the MLP, as the configuration names it.
        norm_offset: added to the weights of norms before they multiply.
        embed_scale: what the embedding's rows are multiplied with on their way into layer 0.
        tied: the head shares the embedding's weight.
    """

    tags: tuple[str, ...]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope: Mapping[str, Any]
    scale: float
    window: int | None = None
    tied: bool = False
    tp: int = 1
    experts: int = 0
    topk: int = 0
    shared: int = 0
    dp: int = 1
    ep: int = 1
    activation: str = "silu"
    norm_offset: float = 0.0
    embed_scale: float = 1.0

    @property
    def expert_tp(self) -> int:
        """Among how many ranks each expert's matrices are split: all of them, or with expert parallelism none.

        Both engines split over the groups too (vllm 0.23.0 ``FusedMoEParallelConfig``, lmdeploy 0.12.2 ``DistConfig``).
        """
        return 1 if self.ep > 1 else self.tp * self.dp

    @property
    def gathers_experts(self) -> bool:
        """Whether the groups' tokens meet before the experts, each of which is split over the ranks of all groups."""
        return self.experts > 0 and self.dp > 1 and self.ep == 1

    def tagged(self, when: str) -> bool:
        """Whether a table's row for models with a tag (``!tag``: without it, nothing: all) is one of this model."""
        return not when or (when.removeprefix("!") in self.tags) != when.startswith("!")

    def has(self, kind: Kind) -> bool:
        """Whether the model has this kind of checkpoint in this layout."""
        if not set(kind.families) & set(self.tags):
            return False
        return self.tp > 1 or "tp > 1" not in kind.exists_when

    def names(self) -> Iterator[Name]:
        """Every checkpoint of the model, in order: the denominator of the coverage."""
        present = [kind for kind in kinds().values() if self.has(kind)]
        once = [Name(kind, None) for kind in present if not kind.per_layer]
        layered = [Name(kind, layer) for layer in range(self.layers) for kind in present if kind.per_layer]
        yield from sorted([*once, *layered], key=lambda name: name.order)

    def operator(self, kind: Kind) -> str:
        """What produces it in this layout."""
        if kind.name == "moe.out":  # the routed alone, beside shared experts, or beside those with a gate
            if self.tp > 1:
                return EXPERT_SUM
            others = {"shared_experts", "gated_shared_experts"} & set(self.tags)
            return ("identity", "add", "gated_add")[len(others)]
        if kind.name == "mlp.act" and self.activation not in SILU:
            return "gelu_mul"
        return kind.operators[-1 if self.tp > 1 else 0]

    def inputs(self, name: Name) -> tuple[Name, ...]:
        """The checkpoints that the operator of ``name`` reads; token ids are no checkpoint."""
        found = []
        kind = name.kind
        if kind.name == "block_in" and name.layer == 0:
            return (Name(kinds()["embed"], None),)
        for alternatives in kind.inputs:
            if len(kind.operators) == 2:  # one alternative per operator
                alternatives = (alternatives[-1 if self.tp > 1 else 0],)
            for text in alternatives:
                step, dot, rest = text.partition(".")
                moved = {"prev": -1, "last": 0}.get(step) if dot else None
                other = kinds().get(rest if moved is not None else text)
                if other is None or not self.has(other):
                    continue
                if moved is None:
                    layer = name.layer if other.per_layer else None
                else:
                    layer = self.layers - 1 if name.layer is None else name.layer + moved
                found.append(Name(other, layer))
                break
        return tuple(found)

    def behind(self, reader: Name, source: Name) -> bool:
        """Whether a checkpoint is computed from another one of its layer, however indirectly."""
        return any(
            one.order == source.order or (one.layer == source.layer and self.behind(one, source))
            for one in self.inputs(reader)
        )

    def size(self, axis: str) -> int:
        """Length of a canonical axis of the whole model; ``tokens`` and ``requests`` have none."""
        sizes = {
            "hidden": self.hidden,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate": self.intermediate,
            "vocab": self.vocab,
            "experts": self.experts,
            "topk": self.topk,
            "shared": self.shared,
            "one": 1,
        }
        return sizes[axis]


def experts_in(config: Mapping[str, Any]) -> int:
    """How many experts a layer has, whatever config.json calls them (transformers 5 writes num_local_experts); or 0."""
    return next((int(config[key]) for key in _EXPERT_COUNTS if config.get(key)), 0)


def structure_of(config: Mapping[str, Any], tp: int = 1, dp: int = 1, ep: int = 1) -> Structure:
    """The structure that a checkpoint's config.json describes.

    Raises:
        ValueError: an architecture that :data:`ARCHITECTURES` does not have, layers of two kinds, or soft caps.
    """
    named = config.get("architectures") or ["unknown"]
    if named[0] not in ARCHITECTURES:
        raise ValueError(f"no checkpoints are defined for {named[0]}; valid: {', '.join(ARCHITECTURES)}")
    tags, gemma = ARCHITECTURES[named[0]], named[0] in _GEMMAS
    config = {**_GEMMAS.get(named[0], {}), **config}
    if gemma and any(config[cap] for cap in _SOFT_CAPS):
        raise ValueError(f"no checkpoints are defined for a model with soft caps ({', '.join(_SOFT_CAPS)})")
    routed = "moe" in tags
    if routed and (config.get("mlp_only_layers") or int(config.get("decoder_sparse_step") or 1) != 1):
        raise ValueError(
            "no checkpoints are defined for a model with dense layers beside layers of experts (mlp_only_layers, "
            "decoder_sparse_step)"
        )
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    window = _window_of(named[0], config)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "max_position_embeddings" in config:  # dynamic scaling begins behind it
        rope.setdefault("max_position_embeddings", int(config["max_position_embeddings"]))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return Structure(
        tags=tags,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["moe_intermediate_size" if routed else "intermediate_size"]),
        vocab=int(config["vocab_size"]),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        scale=_scale_of(config, head_dim),
        window=window,
        tied=bool(config.get("tie_word_embeddings", False)),
        tp=tp,
        dp=dp,
        ep=ep,
        experts=experts_in(config) if routed else 0,
        topk=int(config["num_experts_per_tok"]) if routed else 0,
        shared=int(config["shared_expert_intermediate_size"]) if "shared_experts" in tags else 0,
        activation=str(config.get("hidden_activation") or config.get("hidden_act") or "silu"),
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=float(config["hidden_size"]) ** 0.5 if gemma else 1.0,
    )


def _scale_of(config: Mapping[str, Any], head_dim: int) -> float:
    """Of the attention scores: ``1/sqrt(head_dim)``, or what a configuration puts in its place."""
    if config.get("attention_multiplier") is not None:
        return float(config["attention_multiplier"])
    divisor = float(config.get("query_pre_attn_scalar") or head_dim)
    return 1 / sqrt(divisor)


def _window_of(architecture: str, config: Mapping[str, Any]) -> int | None:
    """The window that layers have, if any; as transformers.

    Llama has none, all of Mistral's layers slide; the Qwens' if told to, from layer ``max_window_layers`` (28 by
    default) on; Gemma's are told by ``layer_types``, every other one by default.

    Raises:
        ValueError: layers of two kinds in a family that has no table for them.
    """
    size = config.get("sliding_window")
    if architecture in _NEVER_SLIDE or size is None:
        return None
    if architecture in _GEMMAS:
        kinds_of_layers = set(config.get("layer_types") or ("sliding_attention", "full_attention"))
        if len(kinds_of_layers) > 1:
            raise ValueError("no checkpoints are defined for a model with and without a window (layer_types)")
        return int(size) if kinds_of_layers == {"sliding_attention"} else None
    slides = architecture in _ALWAYS_SLIDE or (
        config.get("use_sliding_window", False)
        and int(config.get("max_window_layers", 28)) < int(config["num_hidden_layers"])
    )
    return int(size) if slides else None
