"""How a model's routers choose experts, read from config.json as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from align.checkpoints.recompute import Routing
from align.checkpoints.table import experts_in


def routing_of(config: Mapping[str, Any]) -> Routing | None:
    """``None`` for dense models."""
    experts = experts_in(config)
    if not experts or not config.get("num_experts_per_tok"):
        return None
    # Zero experts stand behind the others, in ids and logits alike.
    zero = int(config.get("zero_expert_num") or 0) if config.get("zero_expert_type", "identity") == "identity" else 0
    kind = str(config.get("model_type", ""))
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    if config.get("scoring_func") == "sigmoid" or (kind == "deepseek_v3" and "scoring_func" not in config):
        scoring = "sigmoid"
    grouped = int(config.get("n_group") or 1) > 1 and config.get("topk_method") != "greedy"
    return Routing(
        experts=experts + zero,
        top_k=int(config["num_experts_per_tok"]),
        scoring=scoring,
        # Without a switch the chosen are always normalised (Mixtral), but for models that have it (default: not).
        renormalize=bool(config.get("norm_topk_prob", "num_local_experts" in config)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config["n_group"]) if grouped else 1,
        kept_groups=int(config.get("topk_group") or 1) if grouped else 1,
        group_score="best two" if scoring == "sigmoid" else "best",
        zero=zero,
    )
