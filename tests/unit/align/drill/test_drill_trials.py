"""Trials follow from the seed alone, cover what there is to draw, and their patches hold what was drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.drill.library import Fault, read_fault
from align.drill.trials import draw, expected_of, patch_text, plan, quick

ENGINES = {"candidate": "lmdeploy", "reference": "vllm"}
TEXT = '''"""A title."""

FAULT = {{
    "path": "A",
    "kind": ["one", "other"],
    "source": "somewhere",
    "step": "{{step}}",
    "request": 1,
    "engines": {engines},
    "draws": {{"step": [1, 2, 3], "layer": [0, 1]}},
}}
DRAWN = {{"step": 1, "layer": 0}}


def apply(ctx):
    pass
'''


def fault(tmp_path: Path, name: str = "mine", engines: str = '["lmdeploy", "vllm"]') -> Fault:
    path = tmp_path / f"{name}.py"
    path.write_text(TEXT.format(engines=engines))
    return read_fault(path)


def test_a_seed_gives_the_same_and_another_one_others(tmp_path: Path) -> None:
    one = fault(tmp_path)
    first = plan([one], ENGINES, 5, 4)
    assert first == plan([one], ENGINES, 5, 4)
    assert first == tuple(trial for trial in plan([fault(tmp_path, "more"), one], ENGINES, 5, 4) if trial in first)
    assert any(plan([one], ENGINES, seed, 4) != first for seed in range(6, 12))
    assert len({trial.id for trial in first}) == len(first) == 4
    assert {trial.side for trial in first[:2]} == {"candidate", "reference"}


def test_trials_cover_every_value_on_each_side(tmp_path: Path) -> None:
    trials = plan([fault(tmp_path)], ENGINES, 3, 12)
    for side in ENGINES:
        mine = [one.drawn for one in trials if one.side == side]
        assert len(mine) == 6
        assert {one["step"] for one in mine[:3]} == {1, 2, 3} and {one["layer"] for one in mine[:2]} == {0, 1}


def test_only_engines_that_can_have_it(tmp_path: Path) -> None:
    trials = plan([fault(tmp_path, engines='["vllm"]')], ENGINES, 1, 2)
    assert {(trial.side, trial.engine) for trial in trials} == {("reference", "vllm")}


def test_what_is_expected_is_filled_in(tmp_path: Path) -> None:
    expected = expected_of(fault(tmp_path), "reference", {"step": 2, "layer": 1})
    assert (expected.path, expected.kinds, expected.side) == ("A", ("one", "other"), "reference")
    assert (expected.step, expected.request, expected.checkpoint) == (2, 1, None)


def test_the_patch_has_what_was_drawn(tmp_path: Path) -> None:
    one = fault(tmp_path)
    trial = draw(one, "candidate", "lmdeploy", 3, 1)
    scope: dict[str, Any] = {}
    exec(compile(patch_text(one, trial), "patch", "exec"), scope)
    assert scope["DRAWN"] == dict(trial.drawn) and callable(scope["apply"])


@pytest.mark.parametrize("count", [1, 3])
def test_a_quick_drill_takes_other_faults_first(count: int, tmp_path: Path) -> None:
    faults = [fault(tmp_path, f"f{at}") for at in range(4)]
    chosen = quick(plan(faults, ENGINES, 1, 2), count, 9)
    assert len({trial.fault for trial in chosen}) == len(chosen) == count
    if count == 3:
        assert len({trial.number for trial in chosen}) == 2, "of each another trial"
