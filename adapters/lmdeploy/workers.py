"""lmdeploy's workers as actors of Ray: of the cluster that this host is an actor of.

An actor hands its runtime environment on to what it starts, so that the workers run in this interpreter, with this
side's environment and hooks.
"""

from __future__ import annotations

from typing import Any

from adapters.base import EngineSpec
from adapters.mistakes import Mistake

#: Ray's name for the devices, lmdeploy 0.12.2 (``pytorch/ray.py``).
_RESOURCE = "NPU"


def _ray() -> Any:
    """The Ray that lmdeploy itself uses."""
    from lmdeploy.pytorch.engine.executor import ray_executor

    return ray_executor.ray


def require_cluster(spec: EngineSpec) -> None:
    """Refuse a cluster that lmdeploy would wait for half an hour.

    Raises:
        Mistake: this host is no actor of a cluster, or that has too few devices.
    """
    ray = _ray()
    if not ray.is_initialized():
        raise Mistake(
            "lmdeploy's ray executor needs a cluster of Ray, and this host is a process of its own",
            f"leave out --set {spec.side}.distributed_executor_backend=ray, or use dp 1",
        )
    devices = ray.cluster_resources().get(_RESOURCE, 0)
    if devices < spec.tp * spec.dp:
        raise Mistake(
            f"layout tp{spec.tp} dp{spec.dp} needs {spec.tp * spec.dp} devices, and the Ray cluster has {devices:g} "
            f"of its resource {_RESOURCE}",
            f"start the nodes with --resources='{{\"{_RESOURCE}\": 8}}', or unset RAY_ADDRESS",
        )


def keep_connected(executor: Any) -> None:
    """The connection to Ray is this host's, not the executor's, which would cut it when it closes."""
    context, remove = executor.ray_ctx, _ray().util.remove_placement_group
    context.shutdown = lambda: remove(context.placement_group) if context.owned_pg else None
