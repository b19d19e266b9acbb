"""The walk tells every stage with its reason and what it found, up to where the comparison ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from align.errors import SideError
from align.report.document import render
from align.report.words import words_of
from align.result.parts import WalkStep
from align.result.walk import walk_of
from align.run.flow import Wishes
from tests.unit.align.result import made
from tests.unit.align.run import recordings


def stages(walk: list[WalkStep]) -> list[tuple[str, str]]:
    return [(step.stage, step.state) for step in walk]


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result().walk
    order = ["launch", "conditions", "generate", "conditions", "generate again", "tokens", "record"]
    order += ["audit", "compare"]
    assert stages(walk)[:9] == [(stage, "done") for stage in order]
    assert all(step.why for step in walk)
    assert walk[1].why != walk[3].why
    assert walk[1].about == {"ok": 1, "total": 1, "others": "-"}
    assert "2 of 2 sides repeat" in walk[4].found
    assert walk[5].about["equal"] == 2
    assert walk[7].found == "candidate: not observable; reference: not observable"
    assert walk[8].about["first"] == "layers.1.mlp.up"
    assert "the first at layers.1.mlp.up" in walk[8].found


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
    # Whether indices or a fresh engine say why.
    assert stages(walk)[-5:-3] == [("audit", "done"), ("fresh engine", "stopped")]
    assert "1 of 2 sides repeat" in step.found


def test_what_only_the_recording_tells_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch).go()
    early = (
        recordings.condition("ok"),
        recordings.condition("unknown", "token_ids"),
        recordings.condition("false", "x"),
    )
    run.report.conditions = (early[0], recordings.condition("ok", "token_ids"), early[2])
    run.report.moves = [replace(run.report.moves[0], stage="conditions", conditions=early)]
    result = run.result()
    step = result.walk[0]
    assert step.found == "1 of 3 hold; the others: x; judged after the recording: token_ids"
    assert step.found in render(result)
    assert "3 项中 1 项成立；其余：x；记录之后才判定：token_ids" in render(result, "zh")
    run.report.conditions = early
    assert run.result().walk[0].found == "1 of 3 hold; the others: token_ids, x"


def test_engines_are_told_in_either_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch).go()
    ground = replace(run.ground(), versions={"candidate": {"lmdeploy": "0.12.2"}, "reference": {}})
    step = walk_of(run.report, ground)[0]
    assert step.found == "candidate lmdeploy 0.12.2, reference vllm"
    assert words_of("zh")("found.launch", **step.about) == "候选侧 lmdeploy 0.12.2，参考侧 vllm"
