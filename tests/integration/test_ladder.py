"""The ladder with real engines: which dimension introduces a fault, and what one rank shows already.

A walk takes several launches, so most of it is ``make extended``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.faults import patch
from tests.integration.support import run_align

pytestmark = [pytest.mark.timeout(1500), pytest.mark.extended]
SHORT = ("--max-new-tokens", "4")


def walked(command: str, out: Path, *arguments: str, code: int) -> dict[str, Any]:
    done = run_align(command, "--quiet", *SHORT, "--out", str(out), *arguments, timeout=1400)
    assert done.returncode == code, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert result["ladder"]["conclusion"] is not None
    assert result["ladder"]["conclusion"]["sentence"] in done.stdout
    for rung in result["ladder"]["rungs"]:
        if rung["directory"]:
            assert (out / rung["directory"] / "report.md").is_file()
    return result


def verdicts(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["layout"], one["verdict"]) for one in result["ladder"]["rungs"]]


def test_a_fault_of_tp_alone_starts_the_ladder_by_itself(tmp_path: Path) -> None:
    """One rank puts 1.05 times its part into a reduce: one rank is right, and the engine differs from itself."""
    fault = f"candidate={patch('part_of_a_rank', tmp_path)}"
    result = walked("run", tmp_path / "run", "--tp", "2", "--patch", fault, code=1)
    first, found = result["findings"][0], result["ladder"]["conclusion"]
    assert (first["path"], first["side"], first["checkpoint"]) == ("C", "candidate", "layers.1.mlp.down")
    assert verdicts(result) == [("tp1 dp1 ep1", "aligned"), ("tp2 dp1 ep1", "diverged")]
    assert (found["state"], found["dimension"]) == ("introduced", "tp")
    assert (found["clean_at"], found["introduced_at"]) == ("tp1 dp1 ep1", "tp2 dp1 ep1")
    assert "introduced by TP" in first["summary"]
    (own,) = result["ladder"]["own"]
    assert (own["side"], own["engine"], own["verdict"]) == ("candidate", "lmdeploy", "diverged")
    places = [one["place"] for one in first["evidence"]["read"]["candidate"]]
    assert any(place.startswith("dlinfer/framework/lmdeploy_ext/device/ascend.py:") for place in places), places


def test_a_fault_of_one_rank_is_not_called_path_c(tmp_path: Path) -> None:
    fault = f"candidate={patch('norm', tmp_path)}"
    result = walked("run", tmp_path / "run", "--tp", "2", "--patch", fault, code=1)
    found = result["ladder"]["conclusion"]
    assert verdicts(result)[0] == ("tp1 dp1 ep1", "diverged")
    assert (found["state"], found["dimension"]) == ("everywhere", None)
    assert found["told"]["path"] == "B" and "not introduced by parallelism" in found["sentence"]
    assert result["ladder"]["own"] == []


def test_clean_engines_are_aligned_on_every_rung(tmp_path: Path) -> None:
    result = walked("isolate", tmp_path / "run", "--tp", "2", code=0)
    assert verdicts(result) == [("tp1 dp1 ep1", "aligned"), ("tp2 dp1 ep1", "aligned")]
    assert result["ladder"]["conclusion"]["state"] == "nothing"


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_a_clean_engine_agrees_with_itself_at_one_rank(side: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run_align("run", "--quiet", *SHORT, "--tp", "2", "--against", f"{side}:tp1", "--out", str(out), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert len(set(result["engines"].values())) == 1
    conditions = {one["name"]: one for one in result["conditions"]}
    assert conditions["tp"]["observed"] == {"candidate": 2, "reference": 1}
    assert conditions["tp"]["verdict"] == "ok"


def test_a_model_with_experts_is_aligned_on_every_rung(tmp_path: Path) -> None:
    """One rank, then two groups that gather their tokens, then two that send them to each other's experts."""
    out = tmp_path / "run"
    result = walked("run", out, "--model", "qwen3-moe", "--dp", "2", "--ep", "2", "--ladder", code=0)
    rungs = ("tp1 dp1 ep1", "tp1 dp2 ep1", "tp1 dp2 ep2")
    assert verdicts(result) == [(layout, "aligned") for layout in rungs]
    assert result["ladder"]["conclusion"]["state"] == "nothing"
