"""Rows of tokens sorted by expert, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import checks
from ..numerics import internal
from ..registry import operator

Tensor = torch.Tensor

CUMULATIVE, COUNTS, KEY_VALUE = 0, 1, 2
GATHER, SCATTER = 0, 1
MAX_CHOSEN = 512


def _positions(order: Tensor) -> Tensor:
    """The inverse of a permutation: where each element went."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    return places


def _token_numbers(name: str, counts: Tensor, first: int, kind: int) -> Tensor:
    if kind == CUMULATIVE:
        return counts.cumsum(0)
    if kind == COUNTS:
        return counts
    used = counts.nonzero().flatten()
    pairs = torch.zeros(counts.numel(), 2, dtype=torch.int64)
    pairs[: used.numel()] = torch.stack((used + first, counts[used]), dim=1)
    return pairs


def _init_routing(
    name: str,
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    expert_num: int,
    drop_pad_mode: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: Sequence[int],
    row_idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    checks.dtype(name, "x", x, (*checks.FLOATS, torch.int8))
    checks.rank(name, "x", x, (2,))
    checks.dtype(name, "expert_idx", expert_idx, (torch.int32,))
    checks.rank(name, "expert_idx", expert_idx, (2,))
    if expert_idx.shape[0] != x.shape[0]:
        checks.fail(name, "expert_idx", checks.shape(expert_idx), f"{x.shape[0]} rows, as many as x has")
    checks.choice(name, "expert_tokens_num_type", expert_tokens_num_type, (CUMULATIVE, COUNTS, KEY_VALUE))
    checks.choice(name, "row_idx_type", row_idx_type, (GATHER, SCATTER))
    checks.choice(name, "drop_pad_mode", drop_pad_mode, (0, 1))
    if quant_mode != -1 or offset is not None:
        checks.unsimulated(name, "quantisation (quant_mode other than -1, offset)")
    if drop_pad_mode == 1:
        checks.unsimulated(name, "dropping tokens above a capacity (drop_pad_mode=1)")
    if not expert_tokens_num_flag:
        checks.unsimulated(name, "leaving out the numbers of tokens (expert_tokens_num_flag=False)")
    rows = expert_idx.numel()
    if active_num not in (-1, 0, rows):
        checks.fail(name, "active_num", active_num, f"{rows}, the rows of x times the columns of expert_idx")
    if not 1 <= expert_num <= 10240:
        checks.fail(name, "expert_num", expert_num, "1 to 10240, the number of experts")
    first, end = active_expert_range or (0, expert_num)
    if not 0 <= first < end <= expert_num:
        given = f"[{first}, {end}]"
        checks.fail(name, "active_expert_range", given, f"[first, end] with 0 <= first < end <= {expert_num}")
    if rows:
        low, high = (int(one) for one in torch.aminmax(expert_idx))
        if low < 0 or high >= expert_num:
            checks.fail(name, "expert_idx", f"from {low} to {high}", f"0 to {expert_num - 1}, an expert each")
    if scale is not None:
        checks.dtype(name, "scale", scale, (torch.float32,))
        checks.exact_shape(name, "scale", scale, (x.shape[0],), "one number for each row of x")
    flat = expert_idx.flatten().long()
    active = ((flat >= first) & (flat < end)).nonzero().flatten()
    order = active[flat[active].argsort(stable=True)]
    counts = torch.bincount(flat[active] - first, minlength=end - first)
    tokens = order // max(1, expert_idx.shape[1])
    # What is not written stays undefined on hardware; here it is zero, so that a run repeats itself.
    expanded = x.new_zeros(rows, x.shape[1])
    expanded[: order.numel()] = x[tokens]
    scales = torch.zeros(rows)
    if scale is not None:
        scales[: order.numel()] = scale[tokens]
    row_idx = torch.full((rows,), -1, dtype=torch.int32)
    if row_idx_type == GATHER:
        row_idx[order] = torch.arange(order.numel(), dtype=torch.int32)
    else:
        row_idx[: order.numel()] = order.to(torch.int32)
    return expanded, row_idx, _token_numbers(name, counts, first, expert_tokens_num_type), scales


@operator(
    "npu::npu_moe_init_routing_v2", source="op-plugin docs, npu_moe_init_routing_v2; CANN docs, aclnnMoeInitRoutingV3"
)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = [],
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort tokens by expert: return (rows, places, numbers of tokens, scales of rows).

    x [tokens, hidden], expert_idx int32 [tokens, k]. Rows [tokens * k, hidden] are those of the experts of
    active_expert_range [first, end), expert by expert and then in the order of expert_idx; zeros follow. Places
    (int32 [tokens * k]) say where choice i went (row_idx_type 0; -1 if its expert is outside the range) or which
    choice stands in row i (1). Numbers are int64 [end - first], cumulative (expert_tokens_num_type 0) or counts
    (1), or pairs of expert and count [end - first, 2] (2). Scales are float32 [tokens * k], zero without `scale`.
    """
    name = "npu::npu_moe_init_routing_v2"
    if x_dtype is not None:
        checks.unsimulated(name, "another dtype of x (x_dtype)")
    return _init_routing(
        name, x, expert_idx, scale, offset, active_num, expert_num, drop_pad_mode, expert_tokens_num_type,
        expert_tokens_num_flag, quant_mode, active_expert_range, row_idx_type,
    )  # fmt: skip


@operator("_C_ascend::npu_moe_init_routing_custom", source="vllm-ascend csrc, moe_init_routing_custom")
def npu_moe_init_routing_custom(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = [],
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `npu_moe_init_routing_v2` returns."""
    return _init_routing(
        "_C_ascend::npu_moe_init_routing_custom", x, expert_idx, scale, offset, active_num, expert_num, drop_pad_mode,
        expert_tokens_num_type, expert_tokens_num_flag, quant_mode, active_expert_range, row_idx_type,
    )  # fmt: skip


@operator("npu::npu_moe_token_permute", source="CANN docs, aclnnMoeTokenPermute")
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the tokens sorted by `indices` and, int32 [tokens * k], the row where each choice went.

    tokens [tokens, hidden], indices int32 or int64 [tokens] or [tokens, k]. The first num_out_tokens rows are
    returned; None and 0 mean all, and a negative number leaves out as many at the end.
    """
    name = "npu::npu_moe_token_permute"
    checks.dtype(name, "tokens", tokens, checks.FLOATS)
    checks.rank(name, "tokens", tokens, (2,))
    checks.dtype(name, "indices", indices, checks.INDICES)
    checks.rank(name, "indices", indices, (1, 2))
    if indices.shape[0] != tokens.shape[0]:
        checks.fail(name, "indices", checks.shape(indices), f"{tokens.shape[0]} rows, as many as tokens has")
    chosen = indices.shape[1] if indices.dim() == 2 else 1
    if not 1 <= chosen <= MAX_CHOSEN:
        checks.fail(name, "indices", checks.shape(indices), f"1 to {MAX_CHOSEN} columns")
    if padded_mode:
        checks.unsimulated(name, "padded_mode=True")
    rows = indices.numel()
    wanted = num_out_tokens or rows
    wanted = max(0, rows + wanted) if wanted < 0 else min(wanted, rows)
    order = indices.flatten().argsort(stable=True)
    return tokens[order[:wanted] // chosen], _positions(order).to(torch.int32)


@operator("npu::npu_moe_token_unpermute", source="CANN docs, aclnnMoeTokenUnpermute")
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the sum over a token's choices of its rows times `probs`: [tokens, hidden].

    permuted_tokens [rows, hidden], sorted_indices int32 [tokens * k] (the row of each choice), probs [tokens, k]
    of any float dtype; without probs k is 1 and rows are only put back. `restore_shape` matters in padded mode
    only, which is not simulated.
    """
    name = "npu::npu_moe_token_unpermute"
    checks.dtype(name, "permuted_tokens", permuted_tokens, checks.FLOATS)
    checks.rank(name, "permuted_tokens", permuted_tokens, (2,))
    checks.dtype(name, "sorted_indices", sorted_indices, (torch.int32,))
    checks.rank(name, "sorted_indices", sorted_indices, (1,))
    if padded_mode:
        checks.unsimulated(name, "padded_mode=True")
    if sorted_indices.numel():
        low, high = (int(one) for one in torch.aminmax(sorted_indices))
        if low < 0 or high >= permuted_tokens.shape[0]:
            accepted = f"0 to {permuted_tokens.shape[0] - 1}, a row of permuted_tokens each"
            checks.fail(name, "sorted_indices", f"from {low} to {high}", accepted)
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    checks.dtype(name, "probs", probs, checks.FLOATS)
    checks.rank(name, "probs", probs, (2,))
    if probs.numel() != sorted_indices.numel() or not 1 <= probs.shape[1] <= MAX_CHOSEN:
        accepted = f"[tokens, k] with {sorted_indices.numel()} elements, one for each of sorted_indices"
        checks.fail(name, "probs", checks.shape(probs), accepted)
    parts = internal(rows).view(*probs.shape, -1)
    weights = probs.to(parts.dtype)
    total = parts[:, 0] * weights[:, :1]
    for choice in range(1, probs.shape[1]):
        total = total + parts[:, choice] * weights[:, choice : choice + 1]
    return total.to(permuted_tokens.dtype)
