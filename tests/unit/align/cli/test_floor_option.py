"""``--floor``: what it changes in a comparison, and that the result says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import SIDES
from align.calibrate.floor import Floor, floor_of
from align.trace.format import MANIFEST
from tests.unit.align.calibrate import floors
from tests.unit.align.cli.recorded_runs import Align, make_run


def noisier(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
    """2 % of noise where attention is judged by nothing but the bounds between the sides."""
    value = tensors["layers.1.attn.out"].float()
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(step))
    tensors["layers.1.attn.out"] = (value + 0.02 * value.abs() * noise).bfloat16()


@pytest.fixture
def noisy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    run = make_run(tmp_path / "noisy", monkeypatch, noisier)
    return [str(run / role) for role in SIDES]


def floor_for(side: str) -> Floor:
    """A floor of the recording's own circumstances, below its noise."""
    about: dict[str, Any] = json.loads((Path(side) / "trace" / MANIFEST).read_text())
    return floor_of(
        "strict",
        "bfloat16",
        floors.provenance(
            device=about["spec"]["device"],
            simulated=about["simulated"],
            fingerprint=about["model_info"]["fingerprint"],
            architecture=about["model"]["architectures"][0],
        ),
        floors.samples("attn.out", "whole", 0.3),
    )


def compare(align: Align, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, text, _ = align("compare", *arguments, "--json", "--quiet")
    found = json.loads(text)
    assert isinstance(found, dict)
    return code, found


def test_one_recording_is_judged_by_either_bound(align: Align, noisy: list[str], tmp_path: Path) -> None:
    code, found = compare(align, *noisy)
    assert code == 0 and found["tensors"]["floor"] is None, "no floor is there: derived bounds alone"
    file = tmp_path / "home" / "floors" / "strict.json"
    floor_for(noisy[0]).save(file)
    for option in ("auto", "strict", str(file)):
        code, found = compare(align, *noisy, "--floor", option)
        assert code == 1, option
        assert found["tensors"]["beyond"] == ["layers.1.attn.out"]
        assert found["tensors"]["floor"] == {
            "name": "strict", "simulated": True, "factor": 1.0, "why": "", "wider": False, "judged": 2,
        }  # fmt: skip
        (shown,) = [one for one in found["tensors"]["shown"] if one["name"] == "layers.1.attn.out"]
        assert "by the calibrated floor strict (simulated)" in shown["why"]
        assert found["details"]["tensors"]["policy"]["floor"]["limits"]["attn.out"]["whole"] == pytest.approx(0.45)
    code, found = compare(align, *noisy, "--floor", "none")
    assert code == 0 and found["tensors"]["floor"] is None


def test_the_summary_says_which_floor_judged(align: Align, noisy: list[str], tmp_path: Path) -> None:
    floor_for(noisy[0]).save(tmp_path / "home" / "floors" / "strict.json")
    _, text, _ = align("compare", *noisy)
    assert "between the sides the calibrated floor strict (simulated) judges" in text
    _, text, _ = align("compare", *noisy, "--policy", "seed", "--min-coverage", "0")
    assert "floor strict" not in text


def test_a_floor_that_is_not_there(align: Align, noisy: list[str]) -> None:
    code, _, err = align("compare", *noisy, "--floor", "nowhere")
    assert code == 2
    assert "--floor nowhere is no file and no floor" in err and "align calibrate" in err
