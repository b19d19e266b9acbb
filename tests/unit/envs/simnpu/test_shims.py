"""The table of what stands beside operators: each row's effect, when it is applied, and that there is nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.envs.simnpu import session

SCRIPT = Path(__file__).with_name("shims_checks.py")


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, str]]:
    late = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    first, second = session.run_together(SCRIPT, envs=[late, {**late, "ALIGN_SIMNPU_SOC": "A3"}])
    return {"A2": first, "A3": second}


@pytest.mark.parametrize("name", session.names(SCRIPT))
def test_shims(reports: dict[str, dict[str, str]], name: str) -> None:
    assert not reports["A2"][name], reports["A2"][name]


def test_the_other_generation(reports: dict[str, dict[str, str]]) -> None:
    assert not any(reports["A3"].values()), [error for error in reports["A3"].values() if error]
