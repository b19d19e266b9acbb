"""Tokens sent to the ranks of their experts, and the experts' rows sent back.

Rows that a rank receives lie expert by expert, then by the rank they come from, then in that rank's order. Every row
carries a triple (source rank, token, choice) in `assist_info_for_combine`, which combine sends it home by; the layout
is that of CANN's kernels, three int32 a row in a buffer of 128 a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import checks, settings
from ..registry import operator

Tensor = torch.Tensor

ASSIST = 128
MAX_TOKENS = {"A2": 256, "A3": 512}
MAX_CHOSEN = 16
CUMULATIVE, COUNTS = 0, 1
DISPATCH = "npu::npu_moe_distribute_dispatch_v2"
COMBINE = "npu::npu_moe_distribute_combine_v2"


def _group(name: str, argument: str, group: str, size: int, rank: int) -> Any:
    from ..distributed import groups

    found = groups.get(group)
    if found is None:
        checks.fail(name, argument, repr(group), "a name that get_hccl_comm_name of a process group gave")
    if size != found.size() or rank != found.rank():
        given = f"ep_world_size={size}, ep_rank_id={rank}"
        checks.fail(name, argument, given, f"{found.size()} and {found.rank()}, as that process group says")
    return found


def _all_gather(group: Any, mine: Tensor) -> Tensor:
    """[ranks, ...] of what every rank holds."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([parts], [mine]).wait()
    return torch.stack(parts)


def _all_to_all(group: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    group.alltoall_base(out, rows.contiguous(), received, sent, dist.AllToAllOptions()).wait()
    return out


def _check_uses(name: str, given: dict[str, object], only: dict[str, tuple[object, ...]]) -> None:
    """Refuse uses that are left out: each argument may only have one of the values named here."""
    for argument, values in only.items():
        value = given[argument]
        # A tensor is never one of them, and must not be compared.
        if isinstance(value, torch.Tensor) or value not in values:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            checks.unsimulated(name, f"{argument}={shown}")


_NO_EXTRAS: dict[str, tuple[object, ...]] = {
    "tp_world_size": (0, 1),
    "tp_rank_id": (0,),
    "expert_shard_type": (0,),
    "shared_expert_num": (0, 1),
    "shared_expert_rank_num": (0,),
    "elastic_info": (None,),
    "performance_info": (None,),
    "comm_alg": ("",),
    "zero_expert_num": (0,),
    "copy_expert_num": (0,),
    "const_expert_num": (0,),
}


def _check_experts(name: str, expert_ids: Tensor, tokens: int, moe_expert_num: int, ranks: int) -> None:
    if not 1 <= moe_expert_num <= 1024 or moe_expert_num % ranks:
        checks.fail(name, "moe_expert_num", moe_expert_num, f"a multiple of ep_world_size={ranks}, at most 1024")
    checks.dtype(name, "expert_ids", expert_ids, (torch.int32,))
    checks.rank(name, "expert_ids", expert_ids, (2,))
    limit = MAX_TOKENS[settings.load().soc.generation]
    if not 1 <= tokens <= limit:
        checks.fail(name, "x", f"{tokens} tokens", f"1 to {limit} tokens")
    if expert_ids.shape[0] != tokens or not 1 <= expert_ids.shape[1] <= min(MAX_CHOSEN, moe_expert_num):
        accepted = f"[{tokens}, k], k at most {min(MAX_CHOSEN, moe_expert_num)}"
        checks.fail(name, "expert_ids", checks.shape(expert_ids), accepted)
    low, high = (int(one) for one in torch.aminmax(expert_ids))
    if low < 0 or high >= moe_expert_num:
        checks.fail(name, "expert_ids", f"from {low} to {high}", f"0 to {moe_expert_num - 1}, an expert each")


def _active(name: str, mask: Tensor | None, expert_ids: Tensor) -> Tensor:
    """bool [tokens, k]: which choices take part."""
    everything = torch.ones(expert_ids.shape, dtype=torch.bool)
    if mask is None:
        return everything
    checks.dtype(name, "x_active_mask", mask, (torch.bool,))
    ranks = (1,) if settings.load().soc.generation == "A2" else (1, 2)
    checks.rank(name, "x_active_mask", mask, ranks)
    expected = expert_ids.shape[: mask.dim()]
    checks.exact_shape(name, "x_active_mask", mask, expected, "that of expert_ids")
    if mask.dim() == 2:
        return mask.clone()
    if bool((mask[1:] & ~mask[:-1]).any()):
        checks.fail(name, "x_active_mask", "True behind False", "all True before all False")
    return everything & mask[:, None]


def _check_batches(name: str, group: Any, tokens: int, global_bs: int) -> int:
    """Return the number of tokens that every rank may send, and refuse ranks that disagree (on all of them)."""
    sizes = [int(one) for one in _all_gather(group, torch.tensor([tokens])).flatten()]
    ranks = int(group.size())
    if global_bs == 0:
        if len(set(sizes)) > 1:
            checks.fail(name, "global_bs", f"0 with {sizes} tokens on the ranks", "0 only with as many on each")
        return sizes[0]
    if global_bs % ranks or global_bs < max(sizes) * ranks:
        accepted = f"0 or a multiple of {ranks} ranks, at least {max(sizes) * ranks} ({max(sizes)} tokens on each)"
        checks.fail(name, "global_bs", global_bs, accepted)
    return global_bs // ranks


@operator(DISPATCH, source="op-plugin docs, npu_moe_distribute_dispatch_v2; CANN docs, aclnnMoeDistributeDispatchV2")
def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send each token to the ranks of its experts; expert e lives on rank e // (experts a rank).

    x [tokens, hidden] float16 or bfloat16, expert_ids int32 [tokens, k], x_active_mask bool [tokens] (A3: also
    [tokens, k]). Returns (expand_x [A, hidden], dynamic_scales (empty), assist_info_for_combine int32 [A * 128],
    expert_token_nums int64 [experts of this rank] (cumulative or counts), ep_recv_counts int32 [experts * ranks]:
    cumulative, expert by expert and then rank by rank, tp_recv_counts int32 [1], expand_scales float32 [A or 0]).
    A is the most that could come: tokens * ranks * min(experts of this rank, k); rows behind the received ones are
    zero, on hardware they are undefined.
    """
    name = DISPATCH
    only = _NO_EXTRAS | {"scales": (None,), "quant_mode": (0,)}
    _check_uses(name, locals(), only | dict.fromkeys(("y_dtype", "x_dtype", "scales_dtype"), (None,)))
    checks.choice(name, "expert_token_nums_type", expert_token_nums_type, (CUMULATIVE, COUNTS))
    checks.dtype(name, "x", x, checks.HALVES)
    checks.rank(name, "x", x, (2,))
    group = _group(name, "group_ep", group_ep, ep_world_size, ep_rank_id)
    _check_experts(name, expert_ids, x.shape[0], moe_expert_num, ep_world_size)
    active = _active(name, x_active_mask, expert_ids).flatten()
    if expert_scales is not None:
        checks.dtype(name, "expert_scales", expert_scales, (torch.float32,))
        checks.exact_shape(name, "expert_scales", expert_scales, expert_ids.shape, "that of expert_ids")
    batch = _check_batches(name, group, x.shape[0], global_bs)
    chosen = expert_ids.shape[1]
    local = moe_expert_num // ep_world_size

    flat = expert_ids.flatten().long()
    kept = active.nonzero().flatten()
    order = kept[flat[kept].argsort(stable=True)]
    everyone = _all_gather(group, torch.bincount(flat[order], minlength=moe_expert_num))
    mine = everyone[:, ep_rank_id * local : (ep_rank_id + 1) * local]  # [source rank, local expert]
    sent = everyone[ep_rank_id].view(ep_world_size, local).sum(1).tolist()
    received = mine.sum(1).tolist()

    tokens = order // chosen
    triples = torch.stack((torch.full_like(order, ep_rank_id), tokens, order % chosen), dim=1)
    by_expert = torch.arange(local).repeat(ep_world_size).repeat_interleave(mine.flatten()).argsort(stable=True)
    count = by_expert.numel()
    capacity = batch * ep_world_size * min(local, chosen)
    expand_x = x.new_zeros(capacity, x.shape[1])
    expand_x[:count] = _all_to_all(group, x[tokens], sent, received)[by_expert]
    assist = torch.zeros(capacity * ASSIST, dtype=torch.int32)
    assist[: count * 3] = _all_to_all(group, triples, sent, received)[by_expert].flatten().to(torch.int32)
    expand_scales = torch.zeros(0)
    if expert_scales is not None:
        expand_scales = torch.zeros(capacity)
        expand_scales[:count] = _all_to_all(group, expert_scales.flatten()[order], sent, received)[by_expert]
    numbers = mine.sum(0)
    if expert_token_nums_type == CUMULATIVE:
        numbers = numbers.cumsum(0)
    counts = mine.t().flatten().cumsum(0).to(torch.int32)
    nothing = torch.zeros(1, dtype=torch.int32)
    return expand_x, torch.zeros(0), assist, numbers, counts, nothing, expand_scales


@operator(COMBINE, source="op-plugin docs, npu_moe_distribute_combine_v2; CANN docs, aclnnMoeDistributeCombineV2")
def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """Send the experts' rows home and return, [tokens, hidden], their sum weighted by expert_scales.

    expand_x [A, hidden], assist_info_for_combine and ep_send_counts as `npu_moe_distribute_dispatch_v2` returned
    them (ep_recv_counts there), expert_scales float32 [tokens, k]. Sums are float32 in the order of the choices
    and are rounded once. Tokens that x_active_mask leaves out are zero, on hardware undefined.
    """
    name = COMBINE
    only = _NO_EXTRAS | {"comm_quant_mode": (0,)}
    special = ("shared_expert_x", "ori_x", "const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
    _check_uses(name, locals(), only | dict.fromkeys(special, (None,)))
    checks.dtype(name, "expand_x", expand_x, checks.HALVES)
    checks.rank(name, "expand_x", expand_x, (2,))
    group = _group(name, "group_ep", group_ep, ep_world_size, ep_rank_id)
    _check_experts(name, expert_ids, expert_ids.shape[0], moe_expert_num, ep_world_size)
    active = _active(name, x_active_mask, expert_ids)
    checks.dtype(name, "expert_scales", expert_scales, (torch.float32,))
    checks.exact_shape(name, "expert_scales", expert_scales, expert_ids.shape, "that of expert_ids")
    local = moe_expert_num // ep_world_size
    checks.dtype(name, "ep_send_counts", ep_send_counts, (torch.int32,))
    checks.exact_shape(name, "ep_send_counts", ep_send_counts, (moe_expert_num,), "experts of this rank times ranks")
    checks.dtype(name, "assist_info_for_combine", assist_info_for_combine, (torch.int32,))
    expected = (expand_x.shape[0] * ASSIST,)
    checks.exact_shape(name, "assist_info_for_combine", assist_info_for_combine, expected, "128 for each row")
    count = int(ep_send_counts[-1])
    if not 0 <= count <= expand_x.shape[0]:
        checks.fail(name, "the last of ep_send_counts", count, f"0 to {expand_x.shape[0]}, the rows of expand_x")
    _ = _check_batches(name, group, expert_ids.shape[0], global_bs)

    triples = assist_info_for_combine[: count * 3].view(count, 3).long()
    home = triples[:, 0].argsort(stable=True)
    sent = torch.bincount(triples[:, 0], minlength=ep_world_size).tolist()
    owner = expert_ids.flatten().long()[active.flatten()] // local
    received = torch.bincount(owner, minlength=ep_world_size).tolist()
    # Gathered by all, so that all refuse and none waits for the others.
    numbers = _all_gather(group, torch.tensor([sent, received]))
    if not torch.equal(numbers[:, 0].t(), numbers[:, 1]):
        checks.fail(name, "ep_send_counts", "not that of the dispatch of expert_ids", "what dispatch returned for them")
    rows = _all_to_all(group, expand_x[:count][home], sent, received)
    places = _all_to_all(group, triples[home], sent, received)
    tokens, chosen = expert_ids.shape
    parts = torch.zeros(tokens, chosen, expand_x.shape[1])
    parts[places[:, 1], places[:, 2]] = rows.float()
    total = parts[:, 0] * expert_scales[:, :1]
    for choice in range(1, chosen):
        total = total + parts[:, choice] * expert_scales[:, choice : choice + 1]
    return total.to(expand_x.dtype)
