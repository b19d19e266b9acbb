"""Faults of the released engines with Gemma 2, as the smallest run that shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.models import gemma2, qwen3
from tests.integration.support import run_align

pytestmark = [pytest.mark.timeout(600), pytest.mark.extended]
HIDDEN, WINDOW = 192, 100


def run(directory: Path, changes: dict[str, Any], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Of a preset with another configuration; exit code, result and output."""
    model, out = directory / "model", directory / "run"
    model.mkdir()
    config = {**gemma2.CONFIG, **changes}
    qwen3.build(model, lambda line: None, gemma2.SEED, config, gemma2.shapes, gemma2.centre)
    done = run_align(
        "run", "--quiet", "--model", str(model), "--max-new-tokens", "4", "--no-confirm", "--out", str(out), *arguments,
        timeout=580,
    )  # fmt: skip
    result = json.loads((out / "result.json").read_text()) if (out / "result.json").is_file() else {}
    return done.returncode, result, done.stdout + done.stderr


def test_lmdeploy_does_not_round_the_scale_of_the_embedding(tmp_path: Path) -> None:
    """lmdeploy 0.12.2, models/gemma.py: the factor stays a Python number, so that it is not the one of training.

    transformers and vllm round it to the model's dtype, where the root of 192 (as that of 3584, Gemma-2-9B) is another
    number. The preset's 256 has an exact root.
    """
    code, result, output = run(tmp_path, {"hidden_size": HIDDEN})
    first = result["findings"][0]
    assert (code, first["path"], first["side"], first["checkpoint"]) == (1, "B", "candidate", "layers.0.block_in"), (
        output
    )
    exact, rounded = HIDDEN**0.5, float(torch.tensor(HIDDEN**0.5, dtype=torch.bfloat16))
    factors = [one["parameters"]["ratio"] for one in result["diagnosis"]["fits"] if one["kind"] == "factor"]
    assert factors == [pytest.approx(exact / rounded, rel=2e-4)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    ids = torch.arange(3, 100)
    with torch.no_grad():
        scaled = model.model.embed_tokens(ids)
        rows = torch.nn.functional.embedding(ids, model.model.embed_tokens.weight)
    assert torch.equal(scaled, (rows.double() * rounded).to(torch.bfloat16))
    assert not torch.equal(scaled, (rows.double() * exact).to(torch.bfloat16))


def test_vllm_gives_a_window_to_layers_without_one(tmp_path: Path) -> None:
    """vllm 0.23.0, engine/arg_utils.py: layers that are all ``full_attention`` are not interleaved: all slide then."""
    code, result, output = run(tmp_path, {"sliding_window": WINDOW}, "--allow", "window")
    (condition,) = (one for one in result["conditions"] if one["name"] == "window")
    assert (condition["requested"], condition["observed"]["reference"]) == (0, WINDOW)
    assert "reference" in condition["sides"], condition
    first = result["findings"][0]
    assert (code, first["path"], first["side"], first["checkpoint"]) == (1, "B", "reference", "layers.0.attn.out"), (
        output
    )
    assert result["diagnosis"]["fault"] == "attention_window"
    (fit,) = (one for one in result["diagnosis"]["fits"] if one["kind"] == "attention_window")
    # vllm-ascend hands the window on as the tokens before a query's own.
    assert fit["parameters"] == {"window": WINDOW + 1, "expected": None, "first_position": WINDOW + 1}
