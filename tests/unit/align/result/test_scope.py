"""How far it reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.findings import Finding
from align.result.scope import layers_of, scope_of
from align.run.report import Report
from tests.unit.align.result import made


def test_layers_of_checkpoints_and_of_parameters() -> None:
    names = ("layers.2.mlp.up", "model.layers.10.mlp.up_proj.weight", "embed", "lm_head.weight", "layers.x.y")
    assert layers_of(names) == {2, 10}


def test_origin_and_reach_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scope_of(made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().report)
    assert (found.origin_layers, found.reached_layers, found.checkpoints_beyond) == ([1], [1], 1)


def test_all_findings_count() -> None:
    report = Report(
        findings=(
            Finding(
                "B", "operator", layer=3, phase="decode", requests=("r1",), ranks=(1,), evidence={"layers": [3, 5]}
            ),
            Finding("B", "weights", layer=0, ranks=(0,), evidence={"others": ["model.layers.7.mlp.up_proj.weight"]}),
            Finding("INPUT", "token_ids", requests=("r0", "r1")),
        ),
        comparisons={"free": made.comparison({"r2": (9,), "r3": (1,)}, {"r2": (5,), "r3": (1,)})},
    )
    found = scope_of(report)
    assert found.origin_layers == [0, 3, 5, 7]
    assert (found.requests, found.ranks, found.phases) == (["r1", "r0", "r2"], [0, 1], ["decode"])
    assert found.checkpoints_beyond is None
