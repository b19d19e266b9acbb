"""Ranks that part are a finding of path C, and a run that they end has a verdict and a report."""

from __future__ import annotations

import io
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from adapters.base import SIDES, EngineSpec, Request
from adapters.host import Failure
from align.collectives.order import order_finding
from align.collectives.record.files import FOLDER
from align.collectives.record.mismatch import Mismatch, leave_mismatch
from align.report import terminal
from align.report.document import render
from align.result.build import Command, result_of
from align.result.facts import NO_ANSWERS
from align.result.ground import ground_of_run
from align.run import certify
from align.run import side as side_module
from align.run.collectives import RanksPart
from align.run.flow import Flow, Wishes
from align.run.record import run_record
from align.run.side import Limits, Side
from align.sentences import text_of
from envs.profiles import Interpreter
from tests.unit.align.collectives.parted import SHORT, SKIPPED, call
from tests.unit.align.run import fakes, recordings


def test_the_finding_names_both_calls() -> None:
    found = order_finding(SKIPPED, "candidate")
    assert (found.path, found.kind, found.side) == ("C", "order", "candidate")
    assert (found.checkpoint, found.layer, found.step, found.ranks) == ("layers.1.attn.o", 1, 3, (0, 1))
    zero, one = found.evidence["next_calls"]
    assert (zero["rank"], zero["checkpoint"], zero["site"][0]) == (0, "layers.1.attn.o", "engine/linear.py:30 forward")
    assert (one["rank"], one["checkpoint"], one["shapes"]) == (1, "layers.1.mlp.down", [[4, 64]])
    assert found.evidence["agreed"]["checkpoint"] == "layers.0.mlp.down"
    assert found.evidence["what"] == (
        "the ranks 0, 1 do not make the same collective as number 13 of their group: rank 0 calls all_reduce of "
        "bfloat16 [4, 64] for layers.1.attn.o in step 3 at engine/linear.py:30 forward; rank 1 calls all_reduce of "
        "bfloat16 [4, 64] for layers.1.mlp.down in step 3 at engine/linear.py:31 forward; the call before, all_reduce "
        "for layers.0.mlp.down, both made"
    )
    assert "engine/linear.py:30 forward (rank 0) and engine/linear.py:31 forward (rank 1)" in found.next
    assert "rank 1 在 step 3 调用 all_reduce" in text_of(found.evidence["sentence"], "zh")


def test_a_rank_that_makes_no_further_call() -> None:
    found = order_finding(SHORT, "reference")
    assert found.checkpoint == "layers.1.mlp.down"
    assert found.evidence["next_calls"][1] == {"rank": 1, "operation": None, "run": 1, "step": 3}
    assert "rank 1 has ended step 3 without another call" in found.summary


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        (call(0, "final_norm"), call(1, "layers.3.attn.o"), "layers.3.attn.o"),
        (call(0, "", operation="broadcast"), call(1, "logits"), "logits"),
        (call(0, "no.such"), call(1, "embed"), "embed"),
        (call(0, "", operation="broadcast"), call(1, "", operation="barrier"), "embed"),
    ],
)
def test_the_checkpoint_is_the_first_of_both_in_the_model(first: Any, second: Any, where: str) -> None:
    for mine, theirs in ((first, second), (second, first)):
        mismatch = Mismatch(mine.rank, theirs.rank, ("operation",), mine, theirs)
        assert order_finding(mismatch, "candidate").checkpoint == where


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recordings.Scripted:
    monkeypatch.setattr(certify, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    return recordings.Scripted(tmp_path)


def test_a_run_that_it_ends_has_diverged(session: recordings.Scripted, tmp_path: Path) -> None:
    session.failure = RanksPart("candidate", "lmdeploy", "generate", SKIPPED)
    flow: Any = Flow(session, recordings.case(), recordings.info(), Wishes())  # type: ignore[arg-type]
    report = flow.run()
    assert (report.verdict, report.reason) == ("diverged", "")
    assert report.findings == (order_finding(SKIPPED, "candidate"),)
    assert "observe candidate" not in session.stages, "it is gone, and nobody asks it why"
    record = run_record(recordings.case(), recordings.info(), session.outcome, report, ["align"])
    assert record["verdict"] == "diverged"
    ground = ground_of_run(recordings.case(), recordings.info(), session.outcome, "simnpu", {}, tmp_path)
    command = Command(["align", "run"], "2026-01-01T00:00:00+00:00", tmp_path, "next", True)
    result = result_of(report, ground, command, NO_ANSWERS)
    assert result.verdict == "diverged"
    for language, title in (("en", "order of collectives"), ("zh", "集合通信的次序")):
        text = render(result, language)
        assert title in text
        assert "engine/linear.py:31 forward" in text
    console = Console(file=io.StringIO(), width=400)
    terminal.show_summary(console, recordings.case(), recordings.info(), session.outcome, report, tmp_path)
    assert isinstance(console.file, io.StringIO)
    assert "diverged: Path C (communication and parallelism): order of the candidate" in console.file.getvalue()


def test_the_error_says_it_all_where_no_report_is_made() -> None:
    error = RanksPart("candidate", "lmdeploy", "generate", SKIPPED)
    assert error.message.startswith(
        "the candidate (lmdeploy) was stopped during generate: Path C (communication and parallelism): order of the "
        "candidate at layers.1.attn.o: the ranks 0, 1 do not make the same collective"
    )
    assert "engine/linear.py:30" in error.hint
    assert error.told is not None
    assert text_of(error.told) == error.message


@pytest.mark.parametrize("answer", ["hangs", "wraps", "dies"])
def test_a_side_whose_ranks_part_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Whatever the engine makes of its worker's exception."""
    monkeypatch.setitem(sys.modules, "ray", fakes.fake_ray())
    monkeypatch.setattr(side_module, "_POLL_SECONDS", 0.01)
    actor = fakes.FakeActor({"close": None, "launch": fakes.launched()})
    cluster: Any = fakes.FakeCluster(actor, "none")
    interpreter = Interpreter("lmdeploy", "simnpu", Path("/python"), (), {}, True)
    side = Side(
        cluster, SIDES[0], interpreter, tmp_path / "side", Limits(), lambda stage, detail: None, threading.Event()
    )
    side.launch(EngineSpec("lmdeploy", SIDES[0], "/m", "bfloat16", "/w"))

    def generate(*_: Any) -> Any:
        leave_mismatch(side.directory / FOLDER, SKIPPED)
        if answer == "hangs":
            actor.hang()
        if answer == "dies":
            raise fakes.ActorDiedError("gone")
        return Failure("RuntimeError", "engine core failed, see above", "Traceback …")

    actor.script["generate"] = generate
    started = time.monotonic()
    with pytest.raises(RanksPart) as caught:
        side.generate((Request("r0", (1, 2), 3),), 2)
    assert time.monotonic() - started < 5
    assert caught.value.finding == order_finding(SKIPPED, "candidate")
    actor.end()
