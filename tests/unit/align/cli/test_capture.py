"""``align capture`` without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.probe.spec import CaptureSpec
from align.errors import SideError
from align.ledger.record.files import FOLDER
from align.run import alone, certify
from align.trace.reader import Trace
from tests.unit.align.cli.recorded_runs import Align, FakeAlone
from tests.unit.align.ledger.broken import asked
from tests.unit.align.ledger.launch import launch, leave
from tests.unit.align.ledger.toy import Engine
from tests.unit.align.run import recordings


def test_capture_records_one_engine(align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, err = align("capture", "vllm", "--case", str(case_file), "--out", str(out), "--set", "seed=3")
    assert (code, err) == (0, "")
    assert "reference: 1 of 2 checkpoints recorded, values of 1; 4 rows in 3 steps; 5 kB" in text
    assert "warmup is unknown" in text
    assert "eager is" not in text
    assert f"next: align capture lmdeploy --case {out}/case.json --along {out} --out OTHER" in text
    assert sorted(path.name for path in out.iterdir()) == ["case.json", "tokens.json"]
    (made,) = recorder
    assert made.along is None
    assert made.session.extras["reference"].options == {"seed": 3}
    assert made.session.more["directories"] == {"reference": out / "engine"}
    assert (made.case.candidate, made.case.reference) == ("lmdeploy", "vllm")
    assert (made.budget, made.lean) == (512 * 10**6, False)


def test_a_lean_capture(align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path) -> None:
    given = ("--case", str(case_file), "--out", str(tmp_path / "out"), "--lean")
    assert align("capture", "vllm", *given)[0] == 0
    assert recorder[0].lean


def test_capture_follows_another_trace(
    align: Align, recorder: list[FakeAlone], case_file: Path, clean: Path, tmp_path: Path
) -> None:
    out, along = tmp_path / "out", clean / "reference"
    code, text, _ = align("capture", "lmdeploy", "--case", str(case_file), "--out", str(out), "--along", str(along))
    assert code == 0
    assert recorder[0].along == recordings.generations()
    assert f"next: align compare {out} {along}" in text


def test_capture_takes_any_role(align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert align("capture", "lmdeploy", "--case", str(case_file), "--out", out, "--side", "reference", "-q")[0] == 0
    (made,) = recorder
    assert (made.case.candidate, made.case.reference) == ("lmdeploy", "lmdeploy")
    assert set(made.session.interpreters) == {"reference"}


def test_capture_refuses_with_a_remedy(
    align: Align, recorder: list[FakeAlone], case_file: Path, clean: Path, tmp_path: Path
) -> None:
    other = json.loads(case_file.read_text())
    other["requests"][0]["token_ids"] = [9]
    (tmp_path / "other.json").write_text(json.dumps(other))
    start = ["capture", "vllm", "--case", str(case_file), "--out", str(tmp_path / "out")]
    for arguments, words in (
        (["capture", "sglang", *start[2:]], "sglang is no engine that is recorded"),
        ([*start, "--side", "left"], "--side left is not known"),
        ([*start, "--set", "seed"], "--set seed is not NAME=VALUE"),
        ([*start, "--patch", str(tmp_path / "no.py")], "no.py does not exist"),
        ([*start, "--along", str(tmp_path)], "is no trace"),
        ([*start[:3], str(tmp_path / "other.json"), *start[4:], "--along", str(clean / "reference")], "other prompts"),
        ([*start[:3], str(tmp_path / "nowhere.json"), *start[4:]], "nowhere.json does not exist"),
        ([*start, "--step-timeout", "0"], "is not a time"),
        ([*start, "--capture", "layers.9?.*"], "--capture layers.9?.* matches none of the model's"),
    ):
        code, _, err = align(*arguments)
        assert code == 2, arguments
        assert words in err
        assert "next: " in err
        assert "Traceback" not in err
    assert recorder == []
    assert not (tmp_path / "out").exists()


def test_a_side_that_fails(
    align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeAlone, "error", SideError("reference", "the reference died", "read its log", ("last",)))
    code, _, err = align("capture", "vllm", "--case", str(case_file), "--out", str(tmp_path / "out"))
    assert code == 2
    assert "last" in err
    assert "the reference died" in err


@pytest.mark.parametrize("existed", [True, False])
def test_a_recording_that_failed_can_be_tried_again(
    align: Align,
    recorder: list[FakeAlone],
    case_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    existed: bool,
) -> None:
    out = tmp_path / "out"
    if existed:
        out.mkdir()
    log = out / "engine" / "engine.log"

    def fail(self: FakeAlone, along: Any = None) -> Any:
        log.parent.mkdir()
        log.write_text("why it failed")
        raise SideError("reference", "the reference died", f"leave out --set reference.seed=3; its log is {log}")

    command = ["capture", "vllm", "--case", str(case_file), "--out", str(out), "--set", "seed=3"]
    with monkeypatch.context() as failing:
        failing.setattr(FakeAlone, "run", fail)
        code, _, err = align(*command)
    assert code == 2
    (kept,) = (tmp_path / "home" / "logs").iterdir()
    assert kept.read_text() == "why it failed"
    assert f"leave out --set seed=3; its log is {kept}" in err
    assert out.exists() == existed
    assert not existed or not any(out.iterdir())
    assert align(*command)[0] == 0
    assert (out / "tokens.json").exists()


def test_alone_records_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    monkeypatch.setattr(certify, "evaluate", lambda *_, **given: (recordings.condition("false"),))
    session: Any = recordings.Scripted(tmp_path / "run")
    session.roles = ("reference",)
    del session.outcome.sides["candidate"]
    out = tmp_path / "trace"
    work = session.directories["reference"] / FOLDER
    leave(work, launch([Engine(asked()).run()], ("trace",)))
    recorded = alone.Alone(session, recordings.case(), recordings.info(), out, 10**9).run()
    kept = {path.name: path.read_bytes() for path in (out / FOLDER).iterdir()}
    assert kept == {path.name: path.read_bytes() for path in work.iterdir()}
    assert session.stages == ["launch", "generate", "observe", "again", "record", "closed"]
    assert (len(recorded.checkpoints), recorded.values, recorded.expected) == (40, 40, 40)
    assert (recorded.steps, recorded.rows) == (2, 7)
    assert recorded.stable.stable
    assert [one.verdict for one in recorded.conditions] == ["false"], "told, and judged when two are compared"
    manifest = Trace(out).manifest
    assert (manifest["side"], manifest["conditions"]) == ("reference", [])
    assert session.outcome.sides["reference"].captures == [CaptureSpec(str(out))]


def test_capture_without_the_audit(align: Align, recorder: list[FakeAlone], case_file: Path, tmp_path: Path) -> None:
    for number, more in enumerate(((), ("--no-audit",))):
        out = str(tmp_path / f"out{number}")
        assert align("capture", "vllm", "--case", str(case_file), "--out", out, *more)[0] == 0
        assert recorder[-1].session.more["audit"] is not bool(more)
