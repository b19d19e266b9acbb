"""The hccl backend: two processes, every collective, against what each rank computes on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.envs.simnpu import session

SCRIPT = Path(__file__).with_name("distributed_checks.py")
RANKS = 2


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    store = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    return session.run_together(
        SCRIPT, envs=[{"RANK": str(rank), "WORLD_SIZE": str(RANKS), "STORE": store} for rank in range(RANKS)]
    )


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", [*session.names(SCRIPT), "destroy"])
def test_collective(reports: list[dict[str, str]], name: str, rank: int) -> None:
    assert not reports[rank][name], reports[rank][name]
