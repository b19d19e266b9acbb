"""Golden and the floor on one run of both real engines over the simulated NPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from align.models.resolve import resolve_model
from align.trace.reader import Trace
from tests.integration.faults import patch
from tests.integration.support import run_align


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose candidate has gate and up of layer 1 exchanged, with numerics that differ."""
    folder = tmp_path_factory.mktemp("golden")
    given = ("--patch", f"candidate={patch('swap', folder)}", "--max-new-tokens", "4", "--numerics", "candidate=native")
    done = run_align("run", *given, "--out", str(folder / "run"))
    assert done.returncode == 1, done.stdout + done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def found(faulty: Path) -> dict[str, Any]:
    done = run_align("golden", str(faulty), "--json", "--quiet")
    assert done.returncode == 1, done.stdout + done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def test_the_wrong_side_is_the_one_further_from_the_truth(found: dict[str, Any]) -> None:
    assert found["first"] == "layers.1.mlp.gate"
    verdicts = {one["name"]: one["verdict"] for one in found["checkpoints"]}
    assert verdicts["layers.1.mlp.gate"] == verdicts["logits"] == "candidate further"
    assert "reference further" not in verdicts.values()
    early = {verdict for name, verdict in verdicts.items() if name.startswith("layers.0.") and "indices" not in name}
    assert early == {"alike"}, "right numerics that differ are alike far"


def test_goldens_logits_are_those_of_a_plain_forward(faulty: Path, found: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    golden, reference = Trace(Path(found["golden"]["trace"])), Trace(faulty / "reference" / "trace")
    model = AutoModelForCausalLM.from_pretrained(resolve_model("qwen3").path, dtype=torch.float32)
    forced = {one["request"]: one["steps"] for one in reference.manifest["generations"]["replay"]}
    for entry, request in zip(golden.steps(), golden.manifest["requests"], strict=True):
        ids = [*request["token_ids"], *(step["chosen"] for step in forced[request["name"]])]
        with torch.no_grad():
            whole = model(torch.tensor([ids])).logits[0]
        logits = golden.joined(entry.step, "logits")
        assert logits is not None
        torch.testing.assert_close(logits, whole[len(request["token_ids"]) - 1 :], atol=1e-5, rtol=1e-5)
        assert entry.logits_rows[0] == (request["name"], len(request["token_ids"]) - 1)


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_calibrated_floor_judges_a_recording_again(faulty: Path, tmp_path: Path) -> None:
    file = tmp_path / "floor.json"
    done = run_align(
        "calibrate", "--runs", "2", "--work", str(tmp_path / "runs"), "--out", str(file), "--quiet", timeout=800.0
    )
    assert done.returncode == 0, done.stdout + done.stderr
    floor = json.loads(file.read_text())
    assert floor["provenance"]["simulated"] and len(floor["provenance"]["pairs"]) == 8
    whole = floor["kinds"]["attn.out"]["carried"]["whole"]
    assert 0 < whole["largest"] < 4.0
    clean = [str(tmp_path / "runs" / "run1" / side) for side in ("candidate", "reference")]
    again = run_align("compare", *clean, "--floor", str(file), "--json", "--quiet")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads(again.stdout)["tensors"]["floor"]["simulated"] is True
    wrong = run_align("compare", *(str(faulty / side) for side in ("candidate", "reference")), "--floor", str(file))
    assert wrong.returncode == 1
