"""What each condition demands: values of the case, of the checkpoint's configuration, and constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adapters.probe.model_facts import IN_A_ROW
from align.case.capacity import capacity
from align.case.schema import Case
from align.checkpoints.table import Structure
from align.layout import EXPERT_KEYS
from align.models.info import ModelInfo

#: Other spellings of rope types.
_ROPE_ALIASES = {"su": "longrope"}


def requested(case: Case, info: ModelInfo, structure: Structure) -> dict[str, Any]:
    """Demanded value by condition name; conditions that the model does not have are absent."""
    wanted: dict[str, Any] = {
        "soc": "one generation",
        "warmup": "nothing left by it",
        "eager": True,
        "tp": case.layout.tp,
        "dp": case.layout.dp,
        "ep": case.layout.ep,
        "greedy": "temperature 0 or top_k 1",
        "token_ids": {request.name: list(request.token_ids) for request in case.requests},
        "dtype": case.dtype,
        "block_size": case.batch.block_size,
        "prefix_caching": "off",
        "chunked_prefill": capacity(case).max_prefill_tokens,
        "async_scheduling": "off",
        "ascend_config": "all off",
        "checkpoint_files": "equal",
        "norm_eps": structure.eps,
        "rope_theta": float(structure.rope["rope_theta"]),
        "rope_scaling": rope_type(structure),
        "rope_frequencies": rope_frequencies(info.config, structure),
        "heads": structure.heads,
        "kv_heads": structure.kv_heads,
        "head_dim": structure.head_dim,
        "attention_scale": structure.scale,
        "window": windows(info.config, structure),
        "softcap": float(info.config.get("attn_logit_softcapping") or 0.0),
        "tied_head": structure.tied,
        "layers": structure.layers,
        "vocab": structure.vocab,
        "hidden": structure.hidden,
        "intermediate": structure.intermediate,
        "numerics": "any",
    }
    experts = next((int(info.config[key]) for key in EXPERT_KEYS if info.config.get(key)), 0)
    if experts:
        wanted["routing"] = {
            "experts": experts,
            "top_k": info.config.get("num_experts_per_tok"),
            "renormalize": bool(info.config.get("norm_topk_prob", True)),
        }
        wanted["expert_placement"] = {"per_rank": experts // case.layout.ep, "order": IN_A_ROW}
        wanted["intermediate"] = {"expert": structure.intermediate, "shared": structure.shared}
    return wanted


def rope_type(structure: Structure) -> str:
    named = str(structure.rope.get("rope_type", "default"))
    return _ROPE_ALIASES.get(named, named)


def transformers_config(config: Mapping[str, Any]) -> Any:
    """The configuration as transformers reads it: the meaning that both engines must give to the file."""
    from transformers import AutoConfig

    values = dict(config)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def rope_frequencies(config: Mapping[str, Any], structure: Structure) -> dict[str, Any]:
    """Inverse frequencies ``inv_freq`` of the rotary embedding, in order of the channels, and the ``scale`` of its
    result.

    Returns a ``why`` instead if transformers has no such type of rope: then nothing can be expected.
    """
    kind = rope_type(structure)
    if kind == "default":
        dimension = int(structure.head_dim * float(config.get("partial_rotary_factor") or 1.0))
        exponents = torch.arange(0, dimension, 2, dtype=torch.float64) / dimension
        base = torch.tensor(float(structure.rope["rope_theta"]), dtype=torch.float64)
        return {"inv_freq": torch.pow(base, -exponents).tolist(), "scale": 1.0}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    compute = ROPE_INIT_FUNCTIONS.get(kind)
    if compute is None:
        return {"why": f"transformers has no rope type {kind}"}
    frequencies, scale = compute(transformers_config(config), device=torch.device("cpu"))
    return {"inv_freq": frequencies.double().tolist(), "scale": float(scale)}


def windows(config: Mapping[str, Any], structure: Structure) -> Any:
    """The sliding window of the layers in tokens, 0 for none; a list if layers differ."""
    try:
        read = transformers_config(config)
    except (KeyError, ValueError, TypeError):
        return structure.window or 0  # a model type that this transformers does not know
    window = int(getattr(read, "sliding_window", None) or 0)
    kinds = getattr(read, "layer_types", None)
    if not kinds:
        return window
    distinct = sorted({window if kind == "sliding_attention" else 0 for kind in kinds})
    return distinct[0] if len(distinct) == 1 else distinct
