"""Earlier runs: what each came to, which goes on by itself, and that a run in use stays."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from align.errors import UserError
from align.run.directory import RunDirectory, is_locked
from align.run.earlier import earlier_run, earlier_runs, last_run, newest_run, remove

ENDED = {"verdict": "aligned", "reason": ""}
CONDITION = {"verdict": "not comparable", "reason": "a condition does not hold: x", "conditions": [{"blocks": True}]}
DIED = {"verdict": "not comparable", "reason": "the candidate died", "conditions": [{"blocks": True}]}


def make(place: Path, name: str, result: Any = None, *, age: int = 0, sides: bool = True, request: bool = True) -> Path:
    path = place / name
    path.mkdir(parents=True)
    (path / "case.json").write_text(json.dumps({"model": "/models/tiny"}))
    if request:
        (path / "request.json").write_text("{}")
    if sides:
        (path / "candidate").mkdir()
    if result is not None:
        (path / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
    for file in (path / "case.json", path / "request.json"):
        if file.exists():
            os.utime(file, (10**9 - age, 10**9 - age))
    return path


@pytest.mark.parametrize(
    ("result", "sides", "state"),
    [
        (ENDED, True, "aligned"),
        ({"verdict": "diverged"}, True, "diverged"),
        (None, True, "interrupted"),
        (None, False, "interrupted"),
        ("{", True, "interrupted"),
        ("[1]", True, "interrupted"),
        ({"verdict": "not comparable", "reason": "interrupted"}, False, "interrupted"),
        (CONDITION, True, "refused"),
        ({"verdict": "not comparable", "reason": "x", "stability": [{"stable": False}]}, True, "refused"),
        ({"verdict": "not comparable", "reason": "--confirm x is not possible"}, False, "refused"),
        (DIED, True, "failed"),
        ({"verdict": "not comparable", "reason": "Ray does not start"}, False, "failed"),
        ({"verdict": "not comparable", "reason": "a defect of align: KeyError: 1"}, False, "failed"),
        ({"verdict": "not comparable", "reason": "x", "conditions": [1], "stability": 2}, True, "failed"),
    ],
)
def test_states(tmp_path: Path, result: Any, sides: bool, state: str) -> None:
    run = earlier_run(make(tmp_path, "run", result, sides=sides))
    assert (run.state, run.model, run.resumable) == (state, "/models/tiny", True)
    assert run.goes_on == (state in ("interrupted", "failed"))
    assert bool(run.reason) == (state in ("refused", "failed"))


def test_the_record_of_an_older_version_says_the_verdict_too(tmp_path: Path) -> None:
    path = make(tmp_path, "run", request=False)
    (path / "run.json").write_text(json.dumps(ENDED))
    assert (earlier_run(path).state, earlier_run(path).resumable) == ("aligned", False)


def test_the_newest_that_can_go_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run"):
        last_run(tmp_path / "nowhere")
    make(tmp_path, "b", age=30)
    make(tmp_path, "a", DIED, age=20)
    make(tmp_path, "c", CONDITION, age=5)
    make(tmp_path, "d", ENDED, age=10)
    make(tmp_path, "e", request=False, age=1)
    (tmp_path / "z-no-run").write_text("")
    assert [run.name for run in earlier_runs(tmp_path)] == ["e", "c", "d", "a", "b"]
    assert last_run(tmp_path) == tmp_path / "a"
    with pytest.raises(UserError, match="no run with tokens"):
        newest_run(tmp_path)
    for name in ("b", "d"):
        (tmp_path / name / "tokens.json").write_text("{}")
    assert newest_run(tmp_path) == tmp_path / "d"
    with closing(RunDirectory.reopen(tmp_path / "a")):
        assert last_run(tmp_path) == tmp_path / "b"
        assert earlier_run(tmp_path / "a").state == "running"


def test_none_can_go_on(tmp_path: Path) -> None:
    make(tmp_path, "old", ENDED, age=10)
    make(tmp_path, "new", CONDITION, age=5)
    with pytest.raises(UserError) as caught:
        last_run(tmp_path)
    assert "the newest, new, was refused: a condition does not hold: x" in caught.value.message
    assert "align runs" in caught.value.hint


def test_the_start_is_what_the_run_says_itself(tmp_path: Path) -> None:
    make(tmp_path, "run", {**ENDED, "timing": {"started": "2026-11-29T23:54:19+00:00"}}, age=10**6)
    make(tmp_path, "other", {**ENDED, "timing": {"started": "yesterday"}})
    newest, older = earlier_runs(tmp_path)
    assert (newest.name, newest.started.timestamp()) == ("run", 1795996459.0)
    assert (older.name, older.started.timestamp()) == ("other", 10.0**9)


def test_removal_leaves_a_run_that_is_in_use(tmp_path: Path) -> None:
    path = make(tmp_path, "run", ENDED)
    (path / "candidate" / "trace").write_bytes(b"x" * 100_000)
    run = earlier_run(path)
    with closing(RunDirectory.reopen(path)):
        assert is_locked(path)
        with pytest.raises(UserError, match="is in use"):
            remove(run)
    assert path.is_dir()
    assert not is_locked(path)
    assert remove(run) >= 100_000
    assert not path.exists()


def test_removal_needs_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "run", ENDED)
    monkeypatch.setattr("align.run.directory._locked", lambda path: None)
    with pytest.raises(UserError, match="has no locks"):
        remove(earlier_run(path))
    assert path.is_dir()
