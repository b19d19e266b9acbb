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


def test_what_was_looked_at_is_told_apart_from_the_worst_place() -> None:
    looked = {
        "phases": ["prefill", "decode"], "phases_of": ["prefill", "decode"], "ranks": [1], "ranks_of": [0, 1],
        "requests": ["r0", "r2"], "rows": 7, "rows_of": 128,
    }  # fmt: skip
    first = Finding(
        "B", "operator", "candidate", "layers.1.mlp_norm", 1, requests=("r2",), positions=(9,), ranks=(1,),
        evidence={"layers": [1, 3], "scope": looked},
    )  # fmt: skip
    equal: dict[str, tuple[int, ...]] = {"r0": (9,), "r1": (1,), "r2": (4,)}
    found = scope_of(Report(findings=(first,), comparisons={"free": made.comparison(equal, equal)}))
    assert (found.requests, found.requests_of) == (["r0", "r2"], ["r0", "r1", "r2"])
    assert (found.ranks, found.ranks_of, found.phases) == ([1], [0, 1], ["decode", "prefill"])
    assert (found.rows, found.rows_of, found.origin_layers) == (7, 128, [1, 3])
    assert found.worst is not None
    assert (found.worst.checkpoint, found.worst.request, found.worst.position) == ("layers.1.mlp_norm", "r2", 9)
    slots = Finding("A", "slots", "candidate", "layers.0.attn.kv_start_indices", 0, requests=("r1",), positions=(3, 4))
    assert scope_of(Report(findings=(slots,))).worst is None


def test_layers_and_requests_that_were_compared_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scope_of(made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().report)
    assert (found.layers_of, found.requests_of) == (2, ["r0", "r1"])
