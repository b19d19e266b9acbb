"""Routers of mixture-of-experts layers: which experts a token goes to, and with which weights."""

from __future__ import annotations

import torch

from .. import checks
from ..numerics import internal
from ..registry import operator

Tensor = torch.Tensor

MAX_EXPERTS = 2048
MAX_CHOSEN = 32
SOFTMAX, SIGMOID = 0, 1


def _check_logits(name: str, x: Tensor, k: int, largest: int) -> None:
    checks.dtype(name, "x", x, checks.FLOATS)
    if not 1 <= k <= largest:
        checks.fail(name, "k", k, f"1 to {largest}")


def _top(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest numbers of each row, falling; of equal ones the lower index comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@operator("npu::npu_moe_gating_top_k_softmax", source="op-plugin docs, npu_moe_gating_top_k_softmax")
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest of softmax(x), their experts and the rows they expand to, all [..., k].

    x [tokens, experts] or [batch, tokens, experts]; weights fall, have the dtype of x and are not renormalised.
    Experts and rows are int32; row of choice j of token t is j * tokens + t. A token that `finished` (bool
    [...]) marks goes to expert number `experts`, which does not exist.
    """
    name = "npu::npu_moe_gating_top_k_softmax"
    checks.rank(name, "x", x, (2, 3))
    checks.not_empty(name, "x", x)
    _check_logits(name, x, k, min(x.shape[-1], 1024))
    weights = internal(x).softmax(-1)
    chosen = _top(weights, k)
    experts = chosen.to(torch.int32)
    if finished is not None:
        checks.dtype(name, "finished", finished, (torch.bool,))
        checks.exact_shape(name, "finished", finished, x.shape[:-1], "one flag for each token")
        experts = experts.masked_fill(finished[..., None], x.shape[-1])
    tokens = x.shape[:-1].numel()
    rows = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().reshape(experts.shape)
    return weights.gather(-1, chosen).to(x.dtype), experts, rows.contiguous()


def _keep_groups(scores: Tensor, k_group: int, group_count: int, group_select_mode: int) -> Tensor:
    """`scores` with -inf in all but the k_group best of group_count equal groups of experts."""
    if group_count == 1 or k_group == group_count:
        return scores
    groups = scores.view(scores.shape[0], group_count, -1)
    best = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, -1).values.sum(-1)
    lost = torch.ones_like(best, dtype=torch.bool).scatter_(1, _top(best, k_group), False)
    return groups.masked_fill(lost[..., None], float("-inf")).view_as(scores)


def _gating_top_k(
    name: str,
    x: Tensor,
    k: int,
    bias: Tensor | None,
    bias_argument: str,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    checks.rank(name, "x", x, (2,))
    experts = x.shape[1]
    if not 1 <= experts <= MAX_EXPERTS:
        checks.fail(name, "x", checks.shape(x), f"1 to {MAX_EXPERTS} experts")
    checks.choice(name, "group_select_mode", group_select_mode, (0, 1))
    checks.choice(name, "renorm", renorm, (0, 1))
    checks.choice(name, "norm_type", norm_type, (SOFTMAX, SIGMOID))
    if group_count < 1 or experts % group_count:
        checks.fail(name, "group_count", group_count, f"a divisor of {experts}, the number of experts")
    if not 1 <= k_group <= group_count:
        checks.fail(name, "k_group", k_group, f"1 to {group_count}, the number of groups")
    per_group = experts // group_count
    if group_count > 1 and per_group <= 2:
        checks.fail(name, "group_count", group_count, f"groups of more than 2 experts; there are {experts} experts")
    _check_logits(name, x, k, min(MAX_CHOSEN, per_group * k_group))
    scores = internal(x).softmax(-1) if norm_type == SOFTMAX else internal(x).sigmoid()
    selected_by = scores
    if bias is not None:
        checks.same_dtype(name, bias_argument, bias, "x", x)
        checks.exact_shape(name, bias_argument, bias, (experts,), "one number for each expert")
        selected_by = scores + internal(bias)
    chosen = _top(_keep_groups(selected_by, k_group, group_count, group_select_mode), k)
    weights = scores.gather(1, chosen)
    if norm_type == SIGMOID or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = weights * routed_scaling_factor
    # Without out_flag the operator leaves its third output unwritten.
    out = scores.float() if out_flag else torch.zeros(x.shape, dtype=torch.float32)
    return weights.to(x.dtype), chosen.to(torch.int32), out


@operator("npu::npu_moe_gating_top_k", source="op-plugin docs, npu_moe_gating_top_k; CANN docs, aclnnMoeGatingTopK")
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights [tokens, k] and experts (int32) that a router chooses, and all scores (float32, zeros
    without out_flag).

    x [tokens, experts]. Scores are softmax(x) (norm_type 0) or sigmoid(x) (1). Experts are the best k of score +
    bias within the best k_group of group_count groups; a group counts as its best expert (group_select_mode 0) or
    as the sum of its two best (1). Weights are the scores without bias, divided by their sum + eps for sigmoid
    and with renorm, times routed_scaling_factor, in the dtype of x.
    """
    return _gating_top_k(
        "npu::npu_moe_gating_top_k", x, k, bias, "bias", k_group, group_count, group_select_mode, renorm, norm_type,
        out_flag, routed_scaling_factor, eps,
    )  # fmt: skip


@operator("_C_ascend::moe_gating_top_k", source="vllm-ascend csrc, moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `npu_moe_gating_top_k` returns."""
    return _gating_top_k(
        "_C_ascend::moe_gating_top_k", x, k, bias_opt, "bias_opt", k_group, group_count, group_select_mode, renorm,
        norm_type, out_flag, routed_scaling_factor, eps,
    )  # fmt: skip
