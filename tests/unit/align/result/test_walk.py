"""The walk tells every stage with its reason and what it found, up to where the comparison ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.errors import SideError
from align.result.parts import WalkStep
from align.run.flow import Wishes
from tests.unit.align.result import made
from tests.unit.align.run import recordings


def stages(walk: list[WalkStep]) -> list[tuple[str, str]]:
    return [(step.stage, step.state) for step in walk]


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result().walk
    order = ["launch", "conditions", "generate", "conditions", "generate again", "tokens", "record", "compare"]
    assert stages(walk)[:8] == [(stage, "done") for stage in order]
    assert all(step.why for step in walk)
    assert walk[1].why != walk[3].why
    assert walk[1].about == {"ok": 1, "total": 1, "others": "-"}
    assert "2 of 2 sides repeat" in walk[4].found
    assert walk[5].about["equal"] == 2
    assert walk[7].about["first"] == "layers.1.mlp.up"
    assert "the first at layers.1.mlp.up" in walk[7].found


def test_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = made.Run(tmp_path / "run", monkeypatch, wishes=Wishes(tensors=False, replay="always")).go().result().walk
    assert stages(walk)[-2:] == [("tokens", "done"), ("replay", "done")]


def test_a_condition_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, conditions=(recordings.condition("false", "dtype"),)).go()
    walk = run.result().walk
    assert stages(walk)[:3] == [("launch", "done"), ("conditions", "stopped"), ("generate", "not reached")]
    assert "dtype" in walk[1].found
    assert {step.state for step in walk[2:]} == {"not reached"}
    assert walk[-1].stage == "compare"


def test_a_side_that_dies_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch)
    run.session.failure = SideError("candidate", "the candidate died", "read its log")
    walk = run.go().result().walk
    assert ("generate", "stopped") in stages(walk)
    assert ("generate again", "not reached") in stages(walk)


def test_a_side_that_does_not_repeat_itself_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch)
    run.session.runs["candidate"]["again"] = recordings.generations({"r0": (1, 9), "r1": (3, 4)})
    walk = run.go().result().walk
    step = next(step for step in walk if step.stage == "generate again")
    assert step.state == "stopped"
    assert "1 of 2 sides repeat" in step.found
