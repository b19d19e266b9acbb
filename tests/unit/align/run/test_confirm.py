"""Transplants in a joint run: which replays are made, what they rest on, and that nothing of them stops the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from align.checkpoints.table import parse
from align.conditions import Condition
from align.errors import SideError, UserError
from align.run import certify
from align.run.flow import Flow, Wishes
from align.run.record import report_record
from align.walk.transplant import Accusation
from tests.unit.align.compare import traces
from tests.unit.align.run import recordings
from tests.unit.align.run.recordings import Scripted

UP = "layers.1.mlp.up"
WEIGHT = {
    "parameter": "model.layers.1.mlp.up_proj.weight", "status": "differs", "kind": "mlp.up", "layer": 1,
    "live": "", "rank": 0, "rows": [3], "rows_total": 1, "max_abs": 0.5, "why": "",
}  # fmt: skip


def wrong_up(phase: str, step: int, tensors: dict[str, Any]) -> None:
    """One projection is twice as large, and everything behind it is off."""
    for name in (UP, "layers.1.mlp.act", "layers.1.mlp.down", "final_in", "final_norm", "logits"):
        tensors[name] = tensors[name] * 2


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """The candidate has a wrong weight; a transplant of what it makes repairs everything behind it."""

    def evaluate(*_: Any, **__: Any) -> tuple[Condition, ...]:
        return (recordings.condition(),)

    monkeypatch.setattr(certify, "evaluate", evaluate)
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    made = Scripted(tmp_path)
    made.edits["candidate"], made.weights["candidate"] = wrong_up, [WEIGHT]
    made.repairs = lambda names: UP in names
    return made


def flow(session: Any, **wishes: Any) -> Flow:
    return Flow(session, recordings.case(), recordings.info(), Wishes(**wishes))


def test_the_headline_is_confirmed(session: Scripted, tmp_path: Path) -> None:
    report = flow(session).run()
    assert session.stages[-3:] == ["apart candidate", "apart candidate", "closed"], "two replays of one side"
    (found,) = report.transplants
    assert (found.verdict, found.where, found.known) == ("confirmed", "logits", True)
    assert (found.inputs, found.output) == (("layers.1.mlp_norm",), UP)
    logits, block = found.readings
    assert (logits.none, logits.inputs, logits.output, block.name) == (1.0, 1.0, 0.0, "final_in")
    assert (found.rows, found.ranks) == ({"layers.1.mlp_norm": 7, UP: 7}, 1)
    assert report.findings[0].evidence["transplant"] == found.to_dict()
    record = report_record(report)
    assert json.loads(json.dumps(record))["transplants"][0]["verdict"] == "confirmed"
    assert report.seconds["confirm"] >= 0
    given = load_file(tmp_path / "candidate" / "confirm" / "1" / "output-tensors" / "tensors.safetensors")
    expected = torch.stack([right(UP, request, at) for request, at in (("r0", 0), ("r0", 1), ("r0", 2), ("r0", 3))])
    assert torch.equal(given[UP][:4], expected), "the reference's tensor, row by row"


def right(name: str, request: str, position: int) -> torch.Tensor:
    return traces.value(parse(name), request, position, [24]).bfloat16()


def test_the_traces_of_the_run_are_left_alone(session: Scripted, tmp_path: Path) -> None:
    flow(session, confirm=False).run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("trace/rank0/*")}
    assert before
    with_transplant = Scripted(tmp_path / "other")
    with_transplant.edits, with_transplant.weights = session.edits, session.weights
    flow(with_transplant).run()
    for path, content in before.items():
        assert (tmp_path / "other" / path.relative_to(tmp_path)).read_bytes() == content


def test_it_can_be_left_out(session: Scripted) -> None:
    report = flow(session, confirm=False).run()
    assert report.transplants == ()
    assert not any(stage.startswith("apart") for stage in session.stages)
    assert "transplant" not in report.findings[0].evidence


def test_a_wrong_accusation_is_refuted(session: Scripted) -> None:
    accused = Accusation("candidate", "layers.0.mlp.up")
    report = flow(session, accusations=(accused,)).run()
    headline, wrong = report.transplants
    assert (headline.verdict, wrong.verdict, wrong.where) == ("confirmed", "refuted", "elsewhere")
    assert wrong.checkpoint == "layers.0.mlp.up"
    assert [finding.checkpoint for finding in report.findings] == [UP], "an accusation is no finding"


def test_an_accusation_of_the_headline_is_tried_once(session: Scripted) -> None:
    report = flow(session, accusations=(Accusation("candidate", UP),)).run()
    assert len(report.transplants) == 1


def test_an_accusation_in_a_run_without_findings(session: Scripted) -> None:
    session.edits.clear()
    session.weights.clear()
    report = flow(session, accusations=(Accusation("reference", "layers.0.attn.q"),)).run()
    assert report.verdict == "aligned"
    (found,) = report.transplants
    assert (found.side, found.verdict) == ("reference", "refuted")
    assert found.local is not None
    assert found.local.equal


def test_what_was_not_kept_is_recorded_for_it(session: Scripted) -> None:
    accused = Accusation("candidate", "layers.0.mlp.up")
    report = flow(session, accusations=(accused,), values=("layers.1.*", "final*", "logits"), min_coverage=50.0).run()
    assert [stage for stage in session.stages if stage.startswith("apart")] == [
        "apart candidate", "apart candidate", "apart candidate, reference", "apart candidate", "apart candidate",
    ]  # fmt: skip
    assert [one.verdict for one in report.transplants] == ["confirmed", "refuted"]


@pytest.mark.parametrize("rows", [0, 3])
def test_a_transplant_of_nothing_is_no_result(rows: int, session: Scripted) -> None:
    session.replaced = rows
    (found,) = flow(session).run().transplants
    assert (found.verdict, found.readings) == ("not possible", ())
    assert f"{rows} of 7 rows were replaced" in found.why


def test_an_engine_that_breaks_leaves_the_findings(session: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise SideError("candidate", "the candidate (lmdeploy) died", "read its log")

    monkeypatch.setattr(session, "replay_apart", broken)
    report = flow(session).run()
    assert report.verdict == "diverged"
    assert report.findings[0].checkpoint == UP
    assert (report.transplants[0].verdict, report.transplants[0].why) == (
        "not possible", "the candidate (lmdeploy) died",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accused", "wishes", "why"),
    [
        ("layers.7.mlp.up", {}, "does not exist"),
        ("layers.0.attn.kv_start_indices", {}, "no inverse"),
        ("layers.0.mlp.up", {"tensors": False}, "needs tensors"),
    ],
)
def test_what_cannot_be_tried_is_said_before_anything_starts(
    accused: str, wishes: dict[str, Any], why: str, session: Scripted
) -> None:
    with pytest.raises(UserError, match=why):
        flow(session, accusations=(Accusation("candidate", accused),), **wishes)
    assert session.stages == []
