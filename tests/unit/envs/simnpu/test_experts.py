"""Dispatch and combine between two processes, on both generations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.envs.simnpu import session

SCRIPT = Path(__file__).with_name("expert_checks.py")
RANKS = 2


@pytest.fixture(scope="module", params=["A2", "A3"])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    store = f"file://{tmp_path_factory.mktemp('store') / 'store'}"
    known = {"WORLD_SIZE": str(RANKS), "STORE": store, "ALIGN_SIMNPU_SOC": request.param}
    return session.run_together(SCRIPT, envs=[known | {"RANK": str(rank)} for rank in range(RANKS)])


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", session.names(SCRIPT))
def test_experts(reports: list[dict[str, str]], name: str, rank: int) -> None:
    assert not reports[rank][name], reports[rank][name]
