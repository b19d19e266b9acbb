"""When a run records the candidate once more along the reference's choice of experts, and what comes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.probe.transplant import read_tensors
from align.case.schema import CaseLayout
from align.compare.routes import Routed
from align.errors import UserError
from align.findings import Finding
from align.report.document import render
from align.report.terminal import sentence
from align.result.build import Command, result_of
from align.result.ground import ground_of_run
from align.result.schema import Result
from align.run import certify, offline, routing
from align.run.flow import Flow, Wishes
from align.run.offline import Offline
from align.run.report import Report
from align.run.routing import can_follow, leave_choices, routing_mode, wants_routing
from tests.unit.align.compare import traces
from tests.unit.align.compare.test_routes import AT, CONFIG, near, spoiled
from tests.unit.align.run import recordings
from tests.unit.align.run.recordings import Scripted

START = ["launch", "generate", "observe", "again", "record"]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Both sides are right, but one token's router is at a near-tie."""
    for module in (certify, offline):
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    made = Scripted(tmp_path)
    made.config = CONFIG
    made.edits = {"candidate": spoiled(), "reference": near}
    return made


def run(session: Scripted, **wishes: Any) -> Report:
    info = replace(recordings.info(), config=CONFIG)
    return Flow(session, recordings.case(), info, Wishes(confirm=False, **wishes)).run()  # type: ignore[arg-type]


def test_what_a_near_tie_hides_is_compared_in_a_second_run_of_the_candidate(session: Scripted) -> None:
    report = run(session)
    assert (report.verdict, report.findings) == ("aligned", ())
    assert session.stages == [*START, "record candidate", "closed"]
    assert report.tensors is not None and report.tensors.routing == Routed(3, 0, 7, "candidate")
    assert [one.replayed for one in report.tensors.flips] == [True]
    assert {one.rows for one in report.tensors.checkpoints if one.name != "logits"} == {7}
    assert "1 near-tie of routers, and the 3 rows behind are compared, too" in sentence("a", "b", report)
    content = json.loads((session.directories["candidate"] / "trace" / "trace.json").read_text())
    assert content["capture"]["routing"]["checkpoints"] == [f"layers.{layer}.moe.topk_ids" for layer in range(3)]
    assert "replay routing" in report.seconds


def test_a_fault_behind_a_near_tie_is_found_by_it(session: Scripted) -> None:
    session.edits["candidate"] = spoiled("layers.2.moe.routed")
    assert run(session).findings[0].checkpoint == "layers.2.moe.routed"


def test_without_it_the_same_fault_is_hidden(session: Scripted) -> None:
    session.edits["candidate"] = spoiled("layers.2.moe.routed")
    report = run(session, routing="never")
    assert report.verdict == "aligned" and session.stages == [*START, "closed"]
    assert "3 of 7 rows stand behind 1 near-tie of routers and are not compared" in sentence("a", "b", report)


def test_recordings_that_are_judged_again_say_the_same(session: Scripted) -> None:
    session.edits["candidate"] = spoiled("layers.2.moe.routed")
    run(session)
    compared = Offline((), "derived").run(session.directories)
    assert compared.report.findings[0].checkpoint == "layers.2.moe.routed"
    assert compared.report.tensors is not None and compared.report.tensors.routing == Routed(3, 0, 7, "candidate")


def test_the_request_alone_follows_the_same_choice(session: Scripted) -> None:
    session.edits["candidate"] = spoiled("layers.2.moe.routed")
    report = run(session)
    assert session.stages == [*START, "record candidate", "record alone", "closed"]
    assert report.alone is not None and report.alone.reproduced


def test_what_is_wrong_elsewhere_is_looked_at_first(session: Scripted) -> None:
    def wrong(phase: str, step: int, tensors: dict[str, Any]) -> None:
        spoiled()(phase, step, tensors)
        tensors["layers.0.moe.routed"] *= -1

    session.edits["candidate"] = wrong
    run(session)
    assert "record candidate" not in session.stages
    session.stages.clear()
    run(session, routing="always")
    assert "record candidate" in session.stages


def finding(kind: str) -> Finding:
    return Finding("UNLOCATED", kind)


def test_when_the_routing_is_replayed(session: Scripted) -> None:
    tensors = run(session, routing="never").tensors
    assert tensors is not None and tensors.routing is not None
    assert wants_routing("auto", tensors, ())
    assert wants_routing("auto", tensors, (finding("tokens"),)), "what is hidden may explain it"
    assert not wants_routing("auto", tensors, (finding("operator"),))
    assert wants_routing("always", tensors, (finding("operator"),))
    assert not wants_routing("never", tensors, ())
    assert not wants_routing("always", None, ())
    for routed in (None, Routed(3, 0, 7, "candidate"), Routed(3, 1, 7, "reference")):
        assert not wants_routing("always", replace(tensors, routing=routed), ())


@pytest.mark.parametrize("text", routing.MODES)
def test_modes(text: str) -> None:
    assert routing_mode(text) == text


def test_another_mode_is_refused() -> None:
    with pytest.raises(UserError, match="--replay-routing sometimes is not known") as caught:
        routing_mode("sometimes")
    assert "auto, always, never" in caught.value.hint


def test_a_dense_model_has_no_choices(tmp_path: Path) -> None:
    assert leave_choices(tmp_path / "given", traces.write(tmp_path / "trace")) is None


def test_choices_that_were_not_recorded_are_not_left(tmp_path: Path) -> None:
    def some(phase: str, step: int, tensors: dict[str, Any]) -> None:
        near(phase, step, tensors)
        for layer in (0, 2):
            del tensors[f"layers.{layer}.moe.topk_ids"]

    trace = traces.write(tmp_path / "trace", edit=some, config=CONFIG)
    given = leave_choices(tmp_path / "given", trace)
    assert given is not None and given.checkpoints == (AT[1],)
    ids, rows = read_tensors(Path(given.directory), AT[1])
    assert len(rows) == len(ids) == 7 and rows[0] == ("r0", 0, 0)


@pytest.mark.parametrize(
    ("sizes", "can"), [((1, 1, 1), True), ((2, 1, 1), True), ((1, 2, 1), False), ((1, 2, 2), False)]
)
def test_ranks_that_route_other_tokens_follow_nothing(sizes: tuple[int, int, int], can: bool) -> None:
    tp, dp, ep = sizes
    assert can_follow(CaseLayout(tp=tp, dp=dp, ep=ep)) is can


def document(session: Scripted, report: Report, language: str) -> tuple[Result, str]:
    info = replace(recordings.info(), config=CONFIG)
    directory = session.directories["candidate"].parent
    ground = ground_of_run(recordings.case(), info, session.outcome, "simnpu", {}, directory)
    result = result_of(report, ground, Command(("align", "run"), "2024-01-01T00:00:00", directory, "go"))
    return result, render(result, language)


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_the_report_tells_near_ties_in_both_languages(mode: str, session: Scripted) -> None:
    report = run(session, routing=mode)
    result, english = document(session, report, "en")
    assert result.tensors is not None
    (flip,) = result.tensors.flips
    assert (flip.layer, flip.request, flip.position, flip.candidate, flip.reference) == (1, "r0", 1, [3], [2])
    assert (flip.behind, flip.replayed) == (3, mode == "auto")
    assert "near-tie of a router: r0 position 1 (step 0), layer 1: the candidate chose expert 3" in english
    chinese = document(session, report, "zh")[1]
    assert "路由近似平局：r0" in chinese and "候选侧选了专家 3，参考侧选了专家 2" in chinese
    hidden = "3 of 7 rows stand behind near-ties of routers, and there the sides were not compared"
    assert (hidden in english) is (mode == "never")
    assert ("3 行（共 7 行）位于 1 处路由近似平局之后；全部已比较" in chinese) is (mode == "auto")
    assert ("重放路由" in chinese) is (mode == "auto")
