"""How the tokens of lmdeploy with dlinfer reach the experts, and which experts a rank holds, read as it runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from adapters.probe.dispatch import ALL_GATHER, ALL_TO_ALL, MC2, ROUTED, Dispatch, divided, gathered
from adapters.probe.steplog import process_log

#: dlinfer's ``MoECommType`` by name.
METHODS = {"ALLGATHER": ALL_GATHER, "MC2": MC2, "ALLTOALL": ALL_TO_ALL}
_MARK = "_align_experts"


def dispatch_of(metadata: Any, tokens: int, sizes: Sequence[int] = (), group: int = 0) -> Dispatch:
    """What the metadata of a forward say (lmdeploy 0.12.2, ``AscendOpsBackend``; dlinfer 0.2.7, ``moe_prepare``).

    Args:
        metadata: ``DlinferMoeMetadata``.
        tokens: of this rank's data-parallel group.
        sizes: tokens of each group, if the groups gather them before the experts; ``group`` is this rank's.
    """
    method = METHODS[metadata.moe_comm_type.name]
    padded = tokens + max(0, int(metadata.pad_size))
    if metadata.ep_size > 1:
        if method == ALL_GATHER:  # dlinfer has no such exchange: each rank looks for all experts among its own
            return Dispatch(method, tokens, padded)
        return divided(method, tokens, padded, int(metadata.tp_size), int(metadata.tp_rank))
    if sizes:
        return gathered(tokens, tokens, sum(sizes[:group]), ROUTED[1:], whole=True)
    return Dispatch(method, tokens, tokens)


def _sent(context: Any) -> Dispatch:
    from lmdeploy.pytorch.config import TPMode
    from lmdeploy.pytorch.distributed import get_dist_manager

    live = get_dist_manager().current_context()
    meets = live.dist_config.moe_tp_mode == TPMode.DP_TP and context.dp_meta is not None
    sizes = list(context.dp_meta.moe_tp_sizes) if meets else []
    tokens = int(context.q_seqlens.sum())
    return dispatch_of(context.moe_metadata, tokens, sizes, live.moe_tp_group.rank // live.dist_config.attn_tp)


def install() -> None:
    """Listen to what each forward of this worker decides, once its model is built; done once."""
    module = sys.modules.get("lmdeploy.pytorch.backends.dlinfer.ascend.op_backend")
    if module is None:
        return
    original = module.AscendOpsBackend.update_step_context
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def update_step_context(cls: Any, step_context: Any) -> Any:
        result = original(step_context)
        log = process_log()
        if log is not None and log.recorder is not None and log.recorder.structure.experts:
            log.sent(_sent(result))
        return result

    setattr(update_step_context, _MARK, True)
    module.AscendOpsBackend.update_step_context = classmethod(update_step_context)


def placement(layer: Any) -> list[int]:
    """The global id of each expert that a layer of experts holds here, in its own order."""
    held = layer.expert_list
    return list(range(int(layer.gate_up.weight.shape[0]))) if held is None else [int(one) for one in held]
