"""Earlier runs: what each came to, which goes on by itself, and that a run in use stays."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from adapters.mistakes import Mistake, leave_mistake
from align.errors import UserError
from align.run.directory import RunDirectory, is_locked
from align.run.earlier import earlier_run, earlier_runs, last_run, named_run, newest_run, note_refusal, remove

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
        ({"verdict": "diverged", "ladder": {"conclusion": None}}, True, "interrupted"),
        ({"verdict": "diverged", "ladder": {"conclusion": {"state": "nothing"}}}, True, "diverged"),
        ({"verdict": "diverged", "ladder": None}, True, "diverged"),
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


LAUNCH = "the candidate (lmdeploy) failed to launch: "


@pytest.mark.parametrize(
    ("reason", "next_step", "state"),
    [
        # What the user has to correct stays wrong; what the engine met by itself may not come again.
        (LAUNCH + "TypeError: no such option", "leave out --set candidate.x=1, which …, or correct it", "refused"),
        (LAUNCH + "RuntimeError: out of memory", "read its log, /x; then run the same command again", "failed"),
        (LAUNCH + "OSError: No space left on device", "free disk space at /x, or choose --out elsewhere", "failed"),
        ("the candidate (lmdeploy) died during launch: 9", "leave out --patch candidate=x.py, which …", "failed"),
    ],
)
def test_a_failure_that_would_come_again(tmp_path: Path, reason: str, next_step: str, state: str) -> None:
    run = earlier_run(make(tmp_path, "run", {"verdict": "not comparable", "reason": reason, "next": next_step}))
    assert (run.state, run.reason, run.goes_on) == (state, reason, state == "failed")


def test_a_patch_that_raised_is_not_taken_up_by_itself(tmp_path: Path) -> None:
    reason = LAUNCH + "patch /tmp/raises.py: after_load(ctx) failed: IndexError (line 5)"
    path = make(tmp_path, "run", {"verdict": "not comparable", "reason": reason, "next": "correct the patch"})
    leave_mistake(path / "candidate", Mistake("patch /tmp/raises.py: after_load(ctx) failed", "correct the patch"))
    assert (earlier_run(path).state, earlier_run(path).reason) == ("refused", reason)
    with pytest.raises(UserError, match="the newest, run, was refused: the candidate"):
        last_run(tmp_path)
    (path / "candidate" / "mistake.json").write_text("{")
    assert earlier_run(path).state == "failed"


def test_what_turned_out_not_to_go_on_is_listed_with_its_reason(tmp_path: Path) -> None:
    path = make(tmp_path, "run", {"verdict": "not comparable", "reason": "interrupted"})
    with closing(RunDirectory.reopen(path)) as directory:
        note_refusal(directory, UserError("--confirm x is not possible", "look"))
    assert (earlier_run(path).state, earlier_run(path).reason) == ("refused", "--confirm x is not possible")
    assert json.loads((path / "result.json").read_text())["reason"] == "interrupted"
    (path / "result.json").write_text(json.dumps(ENDED))
    assert earlier_run(path).state == "aligned", "it was named, and went on"


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


def test_a_name_is_looked_for_among_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    listed = make(tmp_path / "home" / "runs", "mine")
    assert named_run(Path("mine")) == listed
    assert named_run(Path("mine/candidate")) == listed / "candidate"
    for other in ("yours", "mine/golden", "../mine", str(tmp_path / "mine")):
        assert named_run(Path(other)) == Path(other)
    (tmp_path / "mine").mkdir()
    assert named_run(Path("mine")) == Path("mine"), "a path that exists wins"
