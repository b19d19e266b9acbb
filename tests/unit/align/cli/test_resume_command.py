"""``align resume`` and ``align replay`` without engines: what they take over from the earlier run, and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from align.errors import SideError, UserError
from align.run.directory import RunDirectory
from align.run.earlier import earlier_run
from tests.unit.align.cli import test_run
from tests.unit.align.cli.test_run import IDS, TOKENS, FakeSession, steps

align, checkpoint = test_run.align, test_run.checkpoint
Align = Callable[..., Any]


def record(path: Path) -> dict[str, Any]:
    content = json.loads((path / "result.json").read_text())
    assert isinstance(content, dict)
    return content


def interrupted(align: Align, checkpoint: Path, out: Path, *options: str) -> None:
    """A run that Ctrl-C ends while the engines start."""
    FakeSession.error = KeyboardInterrupt()
    code, _, err = align(*TOKENS, "--model", str(checkpoint), "--out", str(out), *options)
    assert code == 130
    assert f"next: align resume {out}" in err
    FakeSession.error = None
    FakeSession.made.clear()


def test_an_interrupted_run_is_taken_up_as_it_was_asked_for(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = (
        "--max-new-tokens",
        "3",
        "--numerics",
        "candidate=native",
        "--set",
        "candidate.x=1",
        "--step-timeout",
        "9",
    )
    interrupted(align, checkpoint, out, *options, "--symptom", "wrong words", "--lang", "zh")
    assert record(out)["next"] == f"align resume {out}" or "align resume" in record(out)["next"]
    (out / "half.json.tmp").write_text("{")
    code, text, _ = align("resume", str(out))
    assert code == 0
    assert "are started again" in text
    (session,) = FakeSession.made
    assert session.directory == out
    assert session.interpreters["candidate"].env["ALIGN_SIMNPU_NUMERICS"] == "native"
    assert dict(session.extras["candidate"].options) == {"x": 1}
    assert session.limits.step == 9.0
    assert not (out / "half.json.tmp").exists()
    result = record(out)
    assert result["verdict"] == "aligned"
    assert result["command"][1] == "run", "the command that makes it again, and not the one that took it up"
    assert {"wrong words"} <= {fact["value"] for fact in result["facts"]}
    assert "问题" in (out / "report.zh.md").read_text()
    assert "## Problem" in (out / "report.md").read_text()


def test_it_says_the_same_as_a_run_that_was_not_interrupted(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    interrupted(align, checkpoint, tmp_path / "one")
    assert align("resume", str(tmp_path / "one"))[0] == 0
    assert align(*TOKENS, "--model", str(checkpoint), "--out", str(tmp_path / "two"))[0] == 0
    one, two = (record(tmp_path / name) for name in ("one", "two"))
    for own in ("timing", "environment"):
        one.pop(own), two.pop(own)
    assert one == two


def test_a_run_that_ended_says_its_verdict(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    FakeSession.free = {"candidate": steps(4, 50, 6), "reference": steps(*IDS)}
    FakeSession.forced = {"candidate": steps(4, 50, 6, chosen=IDS), "reference": steps(*IDS)}
    out = tmp_path / "out"
    assert align(*TOKENS, "--model", str(checkpoint), "--out", str(out))[0] == 1
    FakeSession.made.clear()
    code, text, _ = align("resume", str(out))
    assert (code, FakeSession.made) == (1, [])
    assert "has ended: diverged" in text
    code, text, _ = align("resume", str(out), "--json")
    assert (code, json.loads(text)) == (1, record(out))


def test_a_run_is_named_as_it_is_listed(
    align: Align, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSession.free = {"candidate": steps(4, 50, 6), "reference": steps(*IDS)}
    FakeSession.forced = {"candidate": steps(4, 50, 6, chosen=IDS), "reference": steps(*IDS)}
    runs = tmp_path / "home" / "runs"
    assert align(*TOKENS, "--model", str(checkpoint), "--out", str(runs / "mine"))[0] == 1
    code, text, _ = align("resume", "mine")
    assert code == 1 and f"{runs / 'mine'} has ended: diverged" in text
    assert align("--case", "mine/case.json", *TOKENS)[0] == 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    code, _, err = align("resume", "mine")
    assert code == 2 and "holds no run" in err, "a path that exists wins"
    content = record(runs / "mine")
    (runs / "mine" / "result.json").write_text(json.dumps(content | {"schema_version": 1}))
    assert "was written by another version of align" in align("resume", str(runs / "mine"))[1]


def test_the_newest_run_is_taken_up_by_default(align: Align, checkpoint: Path) -> None:
    FakeSession.error = SideError("candidate", "the candidate died", "read its log")
    assert align(*TOKENS, "--model", str(checkpoint))[0] == 2
    FakeSession.error = None
    directory = FakeSession.made[0].directory
    FakeSession.error = UserError("--confirm x is not possible", "look")
    assert align(*TOKENS, "--model", str(checkpoint))[0] == 2
    FakeSession.error = None
    newest = FakeSession.made[1].directory
    code, out, _ = align("resume")
    assert code == 0
    assert f"the newest run that can go on is {directory} (failed: the candidate died)" in " ".join(out.split())
    assert FakeSession.made[2].directory == directory
    code, _, err = align("resume")
    assert code == 2
    assert "can go on: the newest, " in err
    code, out, _ = align("resume", str(newest))
    assert code == 0
    assert f"{newest} was refused: --confirm x is not possible; it is tried once more" in out


def test_what_is_refused_before_the_start_leaves_no_directory(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    given = ("--model", str(checkpoint), "--confirm", "candidate:layers.9.mlp.up", "--out", str(tmp_path / "out"))
    for more in ((), ("--dry-run",)):
        code, _, err = align(*given, *more)
        assert code == 2
        assert "layers.9.mlp.up does not exist" in err
        assert not (tmp_path / "out").exists()


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def asked(path: Path, **changes: Any) -> None:
    """The run was asked for something else, as an earlier version let pass."""
    request = json.loads((path / "request.json").read_text())
    (path / "request.json").write_text(json.dumps(request | changes))


REFUSED = [
    ({"tensors": True, "accuse": ["candidate:layers.9.mlp.up"]}, "layers.9.mlp.up is not possible"),
    ({"tensors": True, "capture": ["layers.77.*"]}, "--capture layers.77.* matches none"),
    ({"policy": "mine"}, "--policy mine is not known"),
    ({"sets": ["candidate"]}, "--set candidate is not SIDE.NAME=VALUE"),
    ({"patch_sha256": {"/nowhere/fix.py": "0"}}, "the patch /nowhere/fix.py is not what it was"),
    ({"fingerprint": "another"}, "is not what it was when the run began"),
    ({"surprise": 1}, "surprise"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_go_on_is_refused_before_anything_changes(
    align: Align, checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    out = tmp_path / "out"
    interrupted(align, checkpoint, out)
    (out / "candidate").mkdir()
    (out / "candidate" / "trace").write_text("values")
    asked(out, **changes)
    before = files(out)
    code, _, err = align("resume", str(out))
    assert (code, FakeSession.made) == (2, [])
    assert message in err
    after = files(out)
    assert message in json.loads(after.pop("refused.json"))["reason"]
    assert after == before and "report.md" in after


def test_the_next_one_is_taken_up_where_the_newest_cannot_go_on(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    runs = tmp_path / "home" / "runs"
    interrupted(align, checkpoint, runs / "1-older")
    interrupted(align, checkpoint, runs / "2-newer")
    asked(runs / "2-newer", tensors=True, accuse=["candidate:layers.9.mlp.up"])
    code, out, _ = align("resume")
    assert code == 0
    assert "2-newer cannot go on: --confirm candidate:layers.9.mlp.up is not possible" in out
    assert f"the newest run that can go on is {runs / '1-older'} (interrupted)" in out
    assert [session.directory for session in FakeSession.made] == [runs / "1-older"]
    code, out, err = align("resume")
    assert (code, out) == (2, ""), "it is known by then"
    assert f"no run in {runs} can go on" in err
    listed = earlier_run(runs / "2-newer")
    assert listed.state == "refused"
    assert listed.reason.startswith("--confirm candidate:layers.9.mlp.up is not possible")
    asked(runs / "2-newer", tensors=False, accuse=[])
    assert align("resume", str(runs / "2-newer"))[0] == 0
    assert not (runs / "2-newer" / "refused.json").exists()


def test_a_patch_that_raised_is_taken_up_only_by_name(align: Align, checkpoint: Path) -> None:
    said = "the candidate (lmdeploy) failed to launch: patch fix.py: after_load(ctx) failed: IndexError: 9 (line 5)"
    FakeSession.error = SideError("candidate", said, "leave out --patch candidate=fix.py, or correct it")
    assert align(*TOKENS, "--model", str(checkpoint))[0] == 2
    directory, FakeSession.error = FakeSession.made.pop().directory, None
    code, _, err = align("resume")
    assert (code, FakeSession.made) == (2, [])
    assert f"the newest, {directory.name}, was refused: {said}" in err
    assert align("resume", str(directory))[0] == 0


def test_a_run_that_is_in_use_is_refused(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(align, checkpoint, out)
    held = RunDirectory.reopen(out)
    code, _, err = align("resume", str(out))
    assert code == 2
    assert "is in use by" in err
    held.close()
    assert align("resume", str(out))[0] == 0


def test_a_model_that_changed_is_refused(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(align, checkpoint, out)
    request = json.loads((out / "request.json").read_text())
    (out / "request.json").write_text(json.dumps(request | {"fingerprint": "another"}))
    code, _, err = align("resume", str(out))
    assert code == 2
    assert "is not what it was when the run began" in err
    assert FakeSession.made == []


def test_a_directory_without_a_run_is_refused(align: Align, tmp_path: Path) -> None:
    for command in ("resume", "replay"):
        code, _, err = align(command, str(tmp_path))
        assert code == 2
        assert "holds no run that can be taken up" in err


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_a_replay_follows_the_earlier_tokens(
    align: Align, checkpoint: Path, tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSession.free = {"candidate": steps(4, 50, 6), "reference": steps(*IDS)}
    out = tmp_path / "out"
    assert (
        align(*TOKENS, "--model", str(checkpoint), "--out", str(out), "--replay", "never", "--allow", "dtype")[0] == 1
    )
    seen: list[Any] = []

    def flow(session: Any, case: Any, info: Any, wishes: Any, keep: Any) -> Any:
        seen.append(wishes)
        raise SideError("candidate", "enough", "look")

    monkeypatch.setattr("align.cli.run.Flow", flow)
    align("replay", str(out), "--along", role, "--out", str(tmp_path / "new"), "--capture", "layers.0.*")
    (wishes,) = seen
    expected = (4, 50, 6) if role == "candidate" else IDS
    assert {one.request: one.token_ids for one in wishes.along} == dict.fromkeys(("r0", "r1", "r2", "r3"), expected)
    assert wishes.tensors and wishes.values == ("layers.0.*",) and wishes.allow == ("dtype",)
    request = json.loads((tmp_path / "new" / "request.json").read_text())
    assert request["along"] == {name: list(expected) for name in ("r0", "r1", "r2", "r3")}


def test_a_replay_needs_tokens(align: Align, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(align, checkpoint, out)
    code, _, err = align("replay", str(out))
    assert code == 2
    assert "holds no tokens to follow" in err
    code, _, err = align("replay", str(out), "--along", "vllm")
    assert "choose one of candidate, reference" in err
