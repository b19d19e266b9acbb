"""lmdeploy's workers as actors: what the cluster must have, and whose connection it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adapters.base import EngineSpec
from adapters.lmdeploy import workers
from adapters.mistakes import Mistake

SPEC = EngineSpec("lmdeploy", "candidate", "/m", "bfloat16", "/w", tp=2, dp=2)


def with_ray(monkeypatch: pytest.MonkeyPatch, **devices: float) -> list[Any]:
    """A Ray whose cluster has these resources; what is removed from it."""
    removed: list[Any] = []
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: devices,
        util=SimpleNamespace(remove_placement_group=removed.append),
    )
    monkeypatch.setattr(workers, "_ray", lambda: ray)
    return removed


def test_a_cluster_with_enough_devices_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch, NPU=4.0, CPU=1.0)
    workers.require_cluster(SPEC)


@pytest.mark.parametrize("devices", [{}, {"NPU": 3.0}])
def test_lmdeploy_would_wait_for_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, devices: dict[str, float]
) -> None:
    with_ray(monkeypatch, **devices)
    with pytest.raises(Mistake, match=r"tp2 dp2 needs 4 devices, and the Ray cluster has [03] of its") as caught:
        workers.require_cluster(SPEC)
    assert "RAY_ADDRESS" in caught.value.hint


def test_a_host_outside_of_ray_has_no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(Mistake, match="needs a cluster of Ray"):
        workers.require_cluster(SPEC)


@pytest.mark.parametrize("owned", [True, False])
def test_the_executor_gives_its_devices_back_and_does_not_cut_the_connection(
    monkeypatch: pytest.MonkeyPatch, owned: bool
) -> None:
    removed = with_ray(monkeypatch)

    def cut() -> None:
        raise AssertionError("the connection is the host's")

    executor = SimpleNamespace(ray_ctx=SimpleNamespace(placement_group="group", owned_pg=owned, shutdown=cut))
    workers.keep_connected(executor)
    executor.ray_ctx.shutdown()
    assert removed == (["group"] if owned else [])
