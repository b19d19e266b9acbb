"""Faults of the released engines with experts on several ranks, as the smallest run that shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support import run_align

pytestmark = [pytest.mark.timeout(900), pytest.mark.extended]
GIVEN = ("--max-new-tokens", "6", "--no-ladder", "--no-confirm")


def run(directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    out = directory / "run"
    done = run_align("run", "--quiet", "--out", str(out), *GIVEN, *arguments, timeout=580)
    result = json.loads((out / "result.json").read_text()) if (out / "result.json").is_file() else {}
    return done.returncode, result, done.stdout + done.stderr


def test_lmdeploy_adds_the_routed_result_once_for_each_rank(tmp_path: Path) -> None:
    """qwen2_moe with tp 2, ep 2: behind the exchange each rank holds all of it, and the block sums it up once more."""
    code, result, output = run(tmp_path, "--model", "qwen2-moe", "--tp", "2", "--ep", "2")
    assert code == 1, output
    first = result["findings"][0]
    assert (first["path"], first["kind"], first["side"]) == ("C", "doubled_reduce", "candidate"), first["summary"]
    assert (first["checkpoint"], first["ranks"]) == ("layers.0.moe.out", [0, 1])
    found = first["evidence"]
    assert (found["part"], found["ratio"]) == ("routed", pytest.approx(2, rel=0.02))
    assert found["shared"] == pytest.approx(1, rel=0.02)
    # transformers computes what the other engine does.
    done = run_align("golden", str(tmp_path / "run"), timeout=280)
    assert "first departure from golden: layers.0.moe.out: candidate further" in done.stdout, done.stdout + done.stderr
