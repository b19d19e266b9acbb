"""``align reduce`` without engines: what is tried, what the directory holds, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from align.case.schema import Case, load_case
from align.cli import main
from align.cli import run as run_module
from tests.unit.align.cli.test_run import IDS, TOKENS, FakeSession, align, checkpoint, steps

__all__ = ["align", "checkpoint"]

Align = Callable[..., tuple[int, str, str]]
Rule = Callable[[Case], bool]


class Wrong(FakeSession):
    """The candidate's tokens differ where ``wrong`` says so."""

    wrong: Rule

    def generate(self) -> None:
        bad = type(self).wrong(self.case)
        self.free = {"candidate": steps(4, 50, 6) if bad else steps(*IDS), "reference": steps(*IDS)}
        self.forced = {"candidate": steps(4, 50, 6, chosen=IDS) if bad else steps(*IDS), "reference": steps(*IDS)}
        super().generate()


@pytest.fixture
def broken(align: Align, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Rule], Path]:
    """A run that diverged by a rule, with a patch that is there for its name alone."""

    def made(rule: Rule) -> Path:
        monkeypatch.setattr(run_module, "Session", Wrong)
        monkeypatch.setattr(Wrong, "wrong", staticmethod(rule), raising=False)
        patch = tmp_path / "fault.py"
        patch.write_text("def apply(ctx):\n    pass\n")
        given = ("--model", str(checkpoint), "--out", str(tmp_path / "run"), "--patch", f"candidate={patch}")
        code, _, _ = align(*TOKENS, *given)
        assert code == 1
        FakeSession.made.clear()
        return tmp_path / "run"

    return made


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["align", "reduce", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_smallest_case_is_left_with_what_reproduces_it(
    broken: Callable[[Rule], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two of the four requests are needed."""
    run = broken(lambda case: {"r1", "r2"} <= {one.name for one in case.requests})
    small = tmp_path / "small"
    code, out, err = call(monkeypatch, capsys, str(run), "--out", str(small))
    assert code == 0, err
    assert [one.name for one in load_case(small / "case.json").requests] == ["r1", "r2"]
    found = json.loads((small / "reduction.json").read_text())
    assert found["shown"] and found["complete"] and found["run"] == str(run)
    assert (found["before"]["requests"], found["after"]["requests"]) == (4, 2)
    assert len(found["tries"]) == len(FakeSession.made) - 1, "and the smallest once more"
    for one in found["tries"]:
        assert f"{one['how']} … {'still there' if one['kept'] else 'gone'}" in out
        assert (small / one["directory"] / "result.json").is_file()
        assert not (small / one["directory"] / "candidate").exists(), "recordings of tries are not kept"
    assert (small / "run" / "report.md").is_file()
    assert FakeSession.made[-1].extras["candidate"].patches == (str(small / "patches" / "0-fault.py"),)


def test_the_script_is_a_command_that_runs_from_its_directory(
    broken: Callable[[Rule], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = tmp_path / "small"
    call(monkeypatch, capsys, str(broken(lambda case: True)), "--out", str(small))
    told = tmp_path / "told"
    told.write_text('#!/bin/sh\npwd; printf "%s\\n" "$@"\n')
    told.chmod(0o755)
    done = subprocess.run(
        [small / "reproduce.sh", "--out", "x"], env={**os.environ, "ALIGN": str(told)}, capture_output=True, text=True
    )
    where, *words = done.stdout.splitlines()
    assert where == str(small)
    assert words[:4] == ["run", "--case", "case.json", "--no-ladder"]
    assert "candidate=patches/0-fault.py" in words and words[-2:] == ["--out", "x"]


def test_the_same_command_goes_on_with_what_was_tried(
    broken: Callable[[Rule], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, small = broken(lambda case: len(case.requests) > 2), tmp_path / "small"
    code, out, _ = call(monkeypatch, capsys, str(run), "--out", str(small), "--tries", "2")
    assert code == 0 and "there was more to try" in out
    tried = len(FakeSession.made) - 1
    FakeSession.made.clear()
    call(monkeypatch, capsys, str(run), "--out", str(small), "--json")
    found = json.loads((small / "reduction.json").read_text())
    assert found["complete"] and found["after"]["requests"] == 3
    assert len(FakeSession.made) == len(found["tries"]) + 1 - tried


def test_a_finding_that_does_not_show_again_is_said(
    broken: Callable[[Rule], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was there by chance: neither a smaller case nor the whole one shows it."""
    run = broken(lambda case: True)
    monkeypatch.setattr(Wrong, "wrong", staticmethod(lambda case: False))
    code, out, _ = call(monkeypatch, capsys, str(run), "--out", str(tmp_path / "small"))
    assert code == 2
    assert "the finding did NOT show again" in out
    assert not json.loads((tmp_path / "small" / "reduction.json").read_text())["shown"]


def test_what_cannot_be_reduced_is_refused(
    broken: Callable[[Rule], Path],
    align: Align,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean = tmp_path / "clean"
    assert align(*TOKENS, "--model", str(checkpoint), "--out", str(clean))[0] == 0
    code, _, err = call(monkeypatch, capsys, str(clean))
    assert code == 2 and "has no finding that could be kept: it is aligned" in err
    code, _, err = call(monkeypatch, capsys)
    assert code == 2 and "that diverged" in err
    run = broken(lambda case: True)
    code, _, err = call(monkeypatch, capsys, str(run), "--tries", "0")
    assert code == 2 and "leaves nothing to try" in err
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    code, _, err = call(monkeypatch, capsys, str(run), "--out", str(other))
    assert code == 2 and "holds something else" in err and (other / "notes.txt").read_text() == "mine"
    (tmp_path / "fault.py").write_text("def apply(ctx):\n    return None\n")
    code, _, err = call(monkeypatch, capsys, str(run))
    assert code == 2 and "fault.py is not what it was" in err
