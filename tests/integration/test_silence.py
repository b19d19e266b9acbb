"""Clean pairs are silent: other weights and prompts, other numerics, other fusion, another batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from align.models import qwen3
from tests.integration.faults import patch
from tests.integration.support import run_align

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
SEEDS = range(20)
#: Real noise: one side's operators sum in the order of the dtype, the other's in float32.
NATIVE = {side: ("--numerics", f"{side}=native") for side in SIDES}


def silent(out: Path, *arguments: str) -> dict[str, Any]:
    done = run_align("run", "--quiet", "--floor", "none", "--out", str(out), *arguments, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert result["findings"] == []
    counts = result["tensors"]["counts"]
    assert counts["within"] > 0, "no noise, so nothing is shown"
    assert counts.get("beyond", 0) == 0
    return result


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", SEEDS)
def test_other_weights_and_prompts(seed: int, side: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    qwen3.build(model, lambda text: None, seed=1000 + seed)
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"token_ids": list(ids)} for ids in qwen3.default_prompts(1000 + seed)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("--model", str(model), "--prompts", str(prompts), "--max-new-tokens", "4")
    silent(tmp_path / "out", *given, *NATIVE[side])


@pytest.mark.parametrize("side", SIDES)
def test_a_norm_that_is_not_fused_with_the_sum(side: str, tmp_path: Path) -> None:
    """N2 of the catalogue."""
    silent(tmp_path / "out", "--patch", f"{side}={patch('unfused', tmp_path)}", *NATIVE["candidate"])


def test_another_order_and_size_of_the_batch(tmp_path: Path) -> None:
    """N4 of the catalogue: the reference runs the requests in another order, one of them late."""
    first = tmp_path / "first"
    silent(first, "--max-new-tokens", "8", *NATIVE["candidate"])
    case = json.loads((first / "case.json").read_text())
    other = {**case, "requests": case["requests"][::-1]}
    other["requests"][0] = {**other["requests"][0], "arrival": 3}
    file = tmp_path / "case.json"
    file.write_text(json.dumps(other))
    recorded = {}
    for engine, side, where, along in (
        ("vllm", "reference", file, None),
        ("lmdeploy", "candidate", first / "case.json", "reference"),
    ):
        out = recorded[side] = tmp_path / side
        more = () if along is None else ("--along", str(recorded[along]))
        given = ("--side", side, "--case", str(where), "--out", str(out), *more)
        done = run_align("capture", engine, *given, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run_align("compare", str(recorded["candidate"]), str(recorded["reference"]), "--floor", "none")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("model", "side"), [("qwen3", "candidate"), ("qwen3", "reference"), ("smollm2", "candidate")])
def test_lean_recordings(model: str, side: str, tmp_path: Path) -> None:
    result = silent(tmp_path / "out", "--model", model, "--lean", *NATIVE[side])
    for part in ("candidate", "reference", "paired"):
        assert result["coverage"][part]["percent"] == 100, result["coverage"][part]
