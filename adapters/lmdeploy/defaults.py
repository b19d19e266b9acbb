"""What lmdeploy is asked for, unless an option (``--set``) says otherwise."""

from __future__ import annotations

from typing import Any

from adapters.base import EngineSpec

#: lmdeploy refuses fewer blocks.
_MIN_BLOCKS = 16


def engine_defaults(spec: EngineSpec) -> dict[str, Any]:
    """Arguments of ``PytorchEngineConfig``."""
    return {
        "dtype": spec.dtype,
        "device_type": "ascend",
        "eager_mode": True,
        "session_len": spec.max_model_len,
        # Prefill is chosen while fewer than half of the batch slots run: room for a whole group twice over.
        "max_batch_size": 4 * spec.max_batch,
        "block_size": spec.block_size,
        "num_gpu_blocks": max(_MIN_BLOCKS, spec.num_blocks),
        "max_prefill_token_num": spec.max_prefill_tokens,
        "enable_prefix_caching": False,
        "enable_metrics": False,
        **_parallel(spec),
    }


def _parallel(spec: EngineSpec) -> dict[str, Any]:
    """lmdeploy counts its data-parallel groups inside ``tp``, and steps them together in workers of Ray.

    Its default for several groups splits the MLP over all of them (``mlp_tp_size`` = ``tp``), gathers the groups'
    tokens before it and scatters the sum behind it. dlinfer's linear layer has no part in that: it ignores
    ``scatter_size`` and adds up all tokens on all ranks (lmdeploy 0.12.2, ``backends/dlinfer/linear.py``), so the first
    forward fails over the shapes. An MLP that is split inside each group alone is what a dense model can run;
    ``moe_tp_size``, which means nothing to it, is then what makes the world as large as all groups (``DistConfig``).
    Experts are split over all groups by it, as they are by default, and in vllm.
    """
    if spec.dp == 1:
        experts = {"ep": spec.ep} if spec.ep > 1 else {}
        return {"tp": spec.tp, **experts, "distributed_executor_backend": "uni" if spec.tp == 1 else "mp"}
    world = spec.tp * spec.dp
    if spec.ep > 1:  # tp is then that of one group, and the experts are spread over all ranks
        return {
            "tp": spec.tp, "dp": spec.dp, "ep": spec.ep, "dp_rank": spec.dp_rank, "distributed_executor_backend": "ray",
        }  # fmt: skip
    return {
        "tp": world,
        "dp": spec.dp,
        "dp_rank": spec.dp_rank,
        "mlp_tp_size": spec.tp,
        "moe_tp_size": world,
        "distributed_executor_backend": "ray",
    }
