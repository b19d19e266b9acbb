"""Dispatch and combine of experts between ranks, against brute force; run by test_experts.py, one process per rank."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.unit.envs.simnpu.session import refused

Tensor = torch.Tensor
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
A3 = os.environ["ALIGN_SIMNPU_SOC"] == "A3"
dist.init_process_group(
    "hccl", init_method=os.environ["STORE"], rank=RANK, world_size=SIZE, timeout=timedelta(seconds=40)
)
npu: Any = vars(torch)["npu"]
npu.set_device(RANK)
WORLD: Any = dist.group.WORLD
GROUP = WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(RANK)
EXPERTS, CHOSEN, HIDDEN = 6, 3, 32
LOCAL = EXPERTS // SIZE


def x_of(rank: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Tokens of a rank, known to every rank; on the host."""
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(dtype)


def ids_of(rank: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(tokens)]).to(torch.int32)


def weights_of(rank: int, tokens: int) -> Tensor:
    return torch.rand(tokens, CHOSEN, generator=torch.Generator().manual_seed(90 + rank))


def arguments(**changes: Any) -> dict[str, Any]:
    known = {"group_ep": GROUP, "ep_world_size": SIZE, "ep_rank_id": RANK, "moe_expert_num": EXPERTS}
    return known | {"group_tp": GROUP, "tp_world_size": 1, "tp_rank_id": 0} | changes


def dispatched(tokens: int, mask: Tensor | None = None, **changes: Any) -> tuple[Tensor, ...]:
    masked = None if mask is None else mask.to("npu")
    x, ids = x_of(RANK, tokens).to("npu"), ids_of(RANK, tokens).to("npu")
    found: tuple[Tensor, ...] = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        x, ids, x_active_mask=masked, **arguments(**changes)
    )
    return found


def combined(rows: Tensor, sent: tuple[Tensor, ...], tokens: int, mask: Tensor | None = None, **changes: Any) -> Tensor:
    masked = None if mask is None else mask.to("npu")
    ids, weights = ids_of(RANK, tokens).to("npu"), weights_of(RANK, tokens).to("npu")
    found: Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
        rows, ids, sent[2], sent[4], weights, tp_send_counts=sent[5], expand_scales=sent[6], x_active_mask=masked,
        **arguments(**changes),
    )  # fmt: skip
    return found


def arriving(sizes: list[int], active: list[list[bool]]) -> list[tuple[int, int, int, int]]:
    """(local expert, source rank, token, choice) of every row that comes here, in order."""
    rows = []
    for expert in range(LOCAL):
        for source in range(SIZE):
            ids = ids_of(source, sizes[source]).tolist()
            for token in range(sizes[source]):
                for choice in range(CHOSEN):
                    if active[source][token] and ids[token][choice] == RANK * LOCAL + expert:
                        rows.append((expert, source, token, choice))
    return rows


def expert64(expert: int, row: Tensor) -> Tensor:
    """What an expert makes of a row: exact in bfloat16 but for one rounding."""
    found: Tensor = row * (expert + 1)
    return found


def by_experts(rows: Tensor, counts: list[int]) -> Tensor:
    """``expert64`` on the device, for rows that lie expert by expert."""
    factors = torch.ones(len(rows))
    first = 0
    for expert, count in enumerate(counts):
        factors[first : first + count] = RANK * LOCAL + expert + 1
        first += count
    found: Tensor = (rows.float() * factors.to("npu")[:, None]).to(rows.dtype)
    return found


def there_and_back(sizes: list[int], active: list[list[bool]], masked: bool, global_bs: int) -> None:
    tokens = sizes[RANK]
    mask = torch.tensor(active[RANK]) if masked else None
    expected = arriving(sizes, active)
    counts = [sum(1 for one in expected if one[0] == expert) for expert in range(LOCAL)]
    for kind in (0, 1):
        sent = dispatched(tokens, mask, global_bs=global_bs, expert_token_nums_type=kind)
        assert all(one.device.type == "npu" for one in sent)
        rows, _, assist, numbers, received = (one.cpu() for one in sent[:5])
        capacity = (global_bs or SIZE * tokens) * min(LOCAL, CHOSEN)
        assert rows.shape == (capacity, HIDDEN)
        for at, (_, source, token, choice) in enumerate(expected):
            assert torch.equal(rows[at], x_of(source, sizes[source])[token])
            assert assist[3 * at : 3 * at + 3].tolist() == [source, token, choice]
        assert assist.shape == (128 * capacity,)
        assert numbers.dtype == torch.int64
        assert numbers.tolist() == (counts if kind else [sum(counts[: at + 1]) for at in range(LOCAL)])
        ends = [
            sum(1 for one in expected if one[:2] <= (expert, source))
            for expert in range(LOCAL)
            for source in range(SIZE)
        ]
        assert received.tolist() == ends
    home = combined(by_experts(sent[0], counts), sent, tokens, mask, global_bs=global_bs)
    assert home.dtype == torch.bfloat16
    x, ids, weights = x_of(RANK, tokens), ids_of(RANK, tokens).tolist(), weights_of(RANK, tokens)
    for token in range(tokens):
        parts = [expert64(ids[token][choice], x[token].double()) for choice in range(CHOSEN)]
        terms = [weights[token, choice].double() * parts[choice] for choice in range(CHOSEN)]
        exact = torch.stack(terms).sum(0) * active[RANK][token]
        size = torch.stack(terms).abs().sum(0)
        # An expert's row is rounded to bfloat16, and so is the sum.
        error = (home[token].cpu().double() - exact).abs()
        assert (error <= 2.02 * 2**-8 * size + 1e-30).all(), f"rank {RANK}, token {token}: off by {error.max()}"


def check_equal_batches() -> None:
    there_and_back([5] * SIZE, [[True] * 5] * SIZE, masked=False, global_bs=0)


def check_a_mask_leaves_tokens_out() -> None:
    active = [[True] * (2 + rank) + [False] * (3 - rank) for rank in range(SIZE)]
    there_and_back([5] * SIZE, active, masked=True, global_bs=0)


def check_a_rank_without_an_active_token() -> None:
    active = [[True] * 3, *[[False] * 3] * (SIZE - 1)]
    there_and_back([3] * SIZE, active, masked=True, global_bs=0)


def check_unequal_batches() -> None:
    sizes = [1 + 3 * rank for rank in range(SIZE)]
    there_and_back(sizes, [[True] * size for size in sizes], masked=False, global_bs=8 * SIZE)


def check_unequal_batches_need_a_global_size() -> None:
    with refused(RuntimeError, "npu::npu_moe_distribute_dispatch_v2: global_bs is 0 with [2, 3] tokens"):
        dispatched(2 + RANK)
    with refused(RuntimeError, "global_bs is 4; accepted: 0 or a multiple of 2 ranks, at least 6"):
        dispatched(2 + RANK, global_bs=4)


def check_a_mask_for_each_choice() -> None:
    mask = torch.ones(4, CHOSEN, dtype=torch.bool)
    mask[:, 1] = False
    if not A3:
        with refused(RuntimeError, "x_active_mask is shape (4, 3); accepted: 1 dimensions"):
            dispatched(4, mask)
        return
    sent = dispatched(4, mask)
    assert int(sent[4][-1]) == sum(
        int(expert) // LOCAL == RANK for rank in range(SIZE) for expert in ids_of(rank, 4)[:, [0, 2]].flatten()
    )
    home = combined(sent[0], sent, 4, mask)
    expected = weights_of(RANK, 4)[:, [0, 2]].sum(1, keepdim=True).double() * x_of(RANK, 4).double()
    assert torch.allclose(home.cpu().double(), expected, rtol=2**-8, atol=1e-6)


def check_weights_travel_with_the_rows() -> None:
    sent = dispatched(4, expert_scales=weights_of(RANK, 4).to("npu"))
    expected = arriving([4] * SIZE, [[True] * 4] * SIZE)
    weights = sent[6].cpu()
    assert all(weights[at] == weights_of(source, 4)[token, choice] for at, (_, source, token, choice) in
               enumerate(expected))  # fmt: skip


def check_counts_of_another_dispatch() -> None:
    sent = dispatched(4)
    other = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        x_of(RANK, 4).to("npu"), ids_of(RANK + 7, 4).to("npu"), **arguments()
    )
    with refused(RuntimeError, "ep_send_counts is not that of the dispatch of expert_ids"):
        combined(sent[0], other, 4)


def check_arguments() -> None:
    limit = 512 if A3 else 256
    for changes, words in (
        ({"ep_rank_id": 1 - RANK}, "ep_rank_id="),
        ({"group_ep": "nobody"}, "group_ep is 'nobody'"),
        ({"moe_expert_num": 5}, "moe_expert_num is 5; accepted: a multiple of ep_world_size=2"),
        ({"moe_expert_num": 4}, "expert_ids is from 0 to 5; accepted: 0 to 3"),
        ({"expert_token_nums_type": 2}, "expert_token_nums_type is 2"),
    ):
        with refused(RuntimeError, words):
            dispatched(4, None, **changes)
    with refused(RuntimeError, f"x is {limit + 1} tokens; accepted: 1 to {limit}"):
        dispatched(limit + 1)
    with refused(RuntimeError, "x_active_mask is True behind False"):
        dispatched(3, torch.tensor([True, False, True]))
    for name, value in {"shared_expert_rank_num": 1, "quant_mode": 2, "zero_expert_num": 1, "tp_world_size": 2}.items():
        with refused(NotImplementedError, f"{name}={value}"):
            dispatched(4, None, **{name: value})
    with refused(NotImplementedError, "scales=a tensor"):
        dispatched(4, scales=torch.ones(EXPERTS, HIDDEN).to("npu"))


def check_the_path_of_all_to_all() -> None:
    """What both engines do without dispatch and combine: permute, exchange by counts, permute again, and back."""
    x, ids = x_of(RANK, 4).to("npu"), ids_of(RANK, 4).to("npu")
    counts = torch.histc(ids, bins=EXPERTS, min=0, max=EXPERTS)
    assert (counts.dtype, counts.device.type) == (torch.int32, "npu")
    assert counts.tolist() == [ids.flatten().tolist().count(expert) for expert in range(EXPERTS)]
    everyone = torch.empty(SIZE * EXPERTS, dtype=counts.dtype).to("npu")
    dist.all_gather_into_tensor(everyone, counts)
    mine = everyone.view(SIZE, EXPERTS)[:, RANK * LOCAL : (RANK + 1) * LOCAL]
    sent, received = counts.view(SIZE, LOCAL).sum(1).tolist(), mine.sum(1).tolist()
    rows, places = torch.ops.npu.npu_moe_token_permute(x, ids, ids.numel())
    arrived = torch.empty(sum(received), HIDDEN, dtype=x.dtype).to("npu")
    dist.all_to_all_single(arrived, rows, received, sent)
    local = torch.arange(LOCAL, dtype=torch.int32).repeat(SIZE).to("npu")
    owner = torch.repeat_interleave(local, mine.reshape(-1))
    ordered, back = torch.ops.npu.npu_moe_token_permute(arrived, owner)
    done = torch.ops.npu.npu_moe_token_unpermute(by_experts(ordered, mine.sum(0).tolist()), back)
    home = torch.empty_like(rows)
    dist.all_to_all_single(home, done, sent, received)
    y = torch.ops.npu.npu_moe_token_unpermute(home, places, weights_of(RANK, 4).to("npu"))
    dispatch = dispatched(4, expert_token_nums_type=1)
    same = combined(by_experts(dispatch[0], dispatch[3].tolist()), dispatch, 4)
    assert torch.equal(y.cpu(), same.cpu())
