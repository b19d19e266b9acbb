"""How vllm-ascend's tokens reach the experts, and which experts a rank holds, read from the running engine."""

from __future__ import annotations

from typing import Any

from adapters.probe.dispatch import ALL_GATHER, ALL_TO_ALL, MC2, ROUTED, Dispatch, divided, gathered

#: vllm-ascend's ``MoECommType`` by name.
METHODS = {"ALLGATHER": ALL_GATHER, "MC2": MC2, "ALLTOALL": ALL_TO_ALL}


def dispatch_of(context: Any, tp: tuple[int, int], dp: tuple[int, int]) -> Dispatch:
    """What a forward's context says (vllm-ascend 0.23.0, ``ascend_forward_context`` and ``prepare_finalize``).

    Args:
        context: ``_EXTRA_CTX`` within a forward.
        tp, dp: size of this rank's group, and its place in it.
    """
    kind = getattr(context.moe_comm_type, "name", "")
    tokens = int(context.num_tokens or 0)
    if kind == "ALLGATHER" and dp[0] > 1:
        padded = int(context.max_tokens_across_dp)
        return gathered(tokens, padded, dp[1] * padded, ROUTED, whole=False)
    if kind == "ALLGATHER":
        return Dispatch(ALL_GATHER, tokens, tokens)
    if kind in ("MC2", "ALLTOALL"):
        padded = int(context.padded_num_tokens) if kind == "MC2" else max(tokens, tp[0])
        return divided(METHODS[kind], tokens, padded, *tp)
    return Dispatch(kind.lower(), tokens, tokens)


def live_dispatch() -> Dispatch:
    """Of the forward that runs in this worker."""
    from vllm.distributed.parallel_state import get_dp_group, get_tp_group
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX

    groups = [(int(one.world_size), int(one.rank_in_group)) for one in (get_tp_group(), get_dp_group())]
    return dispatch_of(_EXTRA_CTX, *groups)


def placement(layer: Any) -> list[int]:
    """The global id of each expert that a layer of experts holds here, in its own order."""
    table = layer._expert_map
    if table is None:
        return list(range(int(layer.local_num_experts)))
    held = {int(local): expert for expert, local in enumerate(table.tolist()) if local >= 0}
    return [held.get(local, -1) for local in range(int(layer.local_num_experts))]
