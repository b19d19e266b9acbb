"""What an interrupted run left: whole recordings are judged as the run would have judged them, others are not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from align.errors import UserError
from align.run import certify, offline
from align.run.flow import Flow, Wishes
from align.run.manifest import FREE, generations_of
from align.run.record import report_record
from align.run.resume import judge_traces, verdict_on_disk, whole_traces
from align.trace.format import MANIFEST
from tests.unit.align.run import recordings
from tests.unit.align.run.recordings import Scripted


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    for module in (certify, offline):
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    return Scripted(tmp_path)


def run(session: Any, **wishes: Any) -> dict[str, Any]:
    return report_record(Flow(session, recordings.case(), recordings.info(), Wishes(**wishes)).run())


def judge(directory: Path) -> Any:
    traces, why = whole_traces(directory)
    assert traces, why
    return judge_traces(traces, (), "derived", 100.0)


def wrong_up(phase: str, step: int, tensors: dict[str, Any]) -> None:
    tensors["layers.1.mlp.up"] = tensors["layers.1.mlp.up"] * 2


@pytest.mark.parametrize("edit", [None, wrong_up])
def test_whole_recordings_say_what_the_run_said(session: Scripted, tmp_path: Path, edit: Any) -> None:
    if edit is not None:
        session.edits["candidate"] = edit
    said = run(session)
    judged, why = judge(tmp_path)
    assert judged is not None, why
    again = report_record(judged.report)
    for name in ("verdict", "findings", "conditions", "stability", "comparisons", "tensors", "surplus", "bytes"):
        assert again[name] == said[name], name
    assert judged.error is None and judged.compared is not None
    assert again["verdict"] == ("aligned" if edit is None else "diverged")


def test_the_sides_are_told_as_they_were(session: Scripted, tmp_path: Path) -> None:
    run(session)
    judged, _ = judge(tmp_path)
    assert judged is not None
    for role, side in session.outcome.sides.items():
        found = judged.outcome.sides[role]
        assert (found.engine, found.spec, found.launched) == (side.engine, side.spec, side.launched)
        assert found.observations == side.observations
        assert found.captures == side.captures[-1:]


def test_a_missing_manifest_means_that_the_engines_are_needed(session: Scripted, tmp_path: Path) -> None:
    assert whole_traces(tmp_path) == ({}, "the candidate has no whole recording")
    run(session)
    (tmp_path / "reference" / "trace" / MANIFEST).unlink()
    assert whole_traces(tmp_path) == ({}, "the reference has no whole recording")


@pytest.mark.parametrize("damage", ["cut manifest", "cut steps"])
def test_a_recording_that_broke_off_is_not_whole(session: Scripted, tmp_path: Path, damage: str) -> None:
    run(session)
    trace = tmp_path / "candidate" / "trace"
    file = trace / MANIFEST if damage == "cut manifest" else trace / "rank0" / "steps.jsonl"
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    traces, why = whole_traces(tmp_path)
    assert traces == {}
    assert why


def test_a_damaged_step_is_recorded_again(session: Scripted, tmp_path: Path) -> None:
    run(session)
    file = next((tmp_path / "candidate" / "trace" / "rank0").glob("step*.safetensors"))
    file.write_bytes(b"\0" * file.stat().st_size)
    judged, why = judge(tmp_path)
    assert judged is None
    assert file.name in why


def test_what_ran_alone_is_taken_in(session: Scripted, tmp_path: Path) -> None:
    session.edits["candidate"] = wrong_up
    flow = Flow(session, recordings.case(), recordings.info(), Wishes())  # type: ignore[arg-type]
    said = flow.run()
    judged, why = judge(tmp_path)
    assert judged is not None, why
    assert judged.report.alone == said.alone
    (tmp_path / "candidate" / "closer" / MANIFEST).unlink()
    judged, why = judge(tmp_path)
    assert judged is None
    assert why == "r0 was not recorded by itself yet"


def test_what_only_a_batch_shows_needs_its_values(session: Scripted, tmp_path: Path) -> None:
    session.edits["candidate"] = wrong_up
    session.batch_only = True
    run(session, values=("layers.1.mlp.up", "layers.1.mlp_norm"), min_coverage=0.0)
    traces, _ = whole_traces(tmp_path)
    assert judge_traces(traces, (), "derived", 0.0)[0] is not None, "they were recorded in a second look"
    for role in SIDES:
        file = tmp_path / role / "trace" / MANIFEST
        content = json.loads(file.read_text()) | {"look": 1}
        content["capture"]["values"] = ["layers.0.*"]
        file.write_text(json.dumps(content))
    judged, why = judge_traces(traces, (), "derived", 0.0)
    assert judged is None
    assert "values of what is accused" in why


def test_a_condition_that_fails_stops_the_judging_too(
    session: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(session)
    monkeypatch.setattr(offline, "evaluate", lambda *_, **__: (recordings.condition("false"),))
    judged, _ = judge(tmp_path)
    assert judged is not None
    assert isinstance(judged.error, UserError)
    assert judged.report.verdict == "not comparable"
    assert judged.report.reason == judged.error.message


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"verdict": "aligned"}', "aligned"),
        ('{"verdict": "diverged"}', "diverged"),
        ('{"verdict": "not comparable"}', None),
        ('{"verdict": "alig', None),
        ("[]", None),
        (None, None),
    ],
)
def test_only_a_verdict_ends_a_run(tmp_path: Path, text: str | None, verdict: str | None) -> None:
    file = tmp_path / "result.json"
    if text is not None:
        file.write_text(text)
    found = verdict_on_disk(file)
    assert (None if found is None else found["verdict"]) == verdict


def test_a_run_follows_given_tokens(session: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    along = recordings.generations()
    seen: list[Any] = []
    replay = session.replay

    def watched(given: Any = None, captures: Any = None) -> None:
        seen.append(given)
        replay(given, captures)

    monkeypatch.setattr(session, "replay", watched)
    run(session, along=along)
    assert seen == [along]
    content = json.loads((tmp_path / "reference" / "trace" / MANIFEST).read_text())
    assert generations_of(content, FREE) is not None


def test_tokens_are_kept_before_and_after_the_recording(session: Scripted) -> None:
    kept: list[int] = []
    flow = Flow(
        session,  # type: ignore[arg-type]
        recordings.case(),
        recordings.info(),
        Wishes(),
        lambda: kept.append(len(session.stages)),
    )
    flow.run()
    assert [session.stages[count - 1] for count in kept] == ["observe", "record"]


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    from align.run.directory import RunDirectory

    path = tmp_path / "run"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - the other process
        RunDirectory(path, tmp_path, "x")
        os.write(writer, b"1")
        signal.pause()
    try:
        assert os.read(reader, 1) == b"1"
        with pytest.raises(UserError) as caught:
            RunDirectory.reopen(path)
        assert "is in use by" in caught.value.message
        if f"process {child}" in caught.value.message:  # where the kernel tells
            assert caught.value.hint.endswith(f"kill {child}")
        with pytest.raises(UserError, match="is in use by"):
            RunDirectory(path, tmp_path, "x")  # it is empty, but taken
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    RunDirectory.reopen(path).close()
