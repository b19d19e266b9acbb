"""The audit among the stages of a run: the records go with the trace, path A is found with and without engines, and an
engine that does not repeat itself is explained by its indices where these are wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.base import SIDES
from align.conditions import Condition
from align.errors import UserError
from align.ledger.record.files import FOLDER
from align.ledger.sides import NO_RECORDS
from align.run import certify, offline
from align.run.audit import keep_and_audit, keep_records
from align.run.flow import Flow, Wishes
from align.run.offline import Offline
from align.run.report import Report
from tests.unit.align.ledger.broken import CASES, asked, ran
from tests.unit.align.ledger.launch import launch, leave
from tests.unit.align.ledger.toy import Engine
from tests.unit.align.run import recordings
from tests.unit.align.run.recordings import Scripted


def toy(name: str = "") -> Engine:
    return ran(next(case for case in CASES if case.name == name)) if name else Engine(asked()).run()


class WithRecords(Scripted):
    """Its workers leave the records of three runs, and of a request alone as a fourth."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        #: By role, the faults of runs 1, 2, 3 and of the request alone; empty for right ones.
        self.faults: dict[str, tuple[str, str, str, str]] = dict.fromkeys(SIDES, ("", "", "", ""))
        self.audit = True

    def _leave(self, runs: int, last: str) -> None:
        names = (*("", "", "trace", "closer")[: runs - 1], last)
        for role in SIDES if self.audit else ():
            engines = [toy(name) for name in self.faults[role][:runs]]
            leave(self.directories[role] / FOLDER, launch(engines, names))

    def generate_again(self) -> None:
        super().generate_again()
        self._leave(2, "")

    def replay(self, *given: Any, **named: Any) -> None:
        super().replay(*given, **named)
        self._leave(3, "trace")

    def replay_some(self, *given: Any, **named: Any) -> Any:
        found = super().replay_some(*given, **named)
        self._leave(4, "closer")
        return found


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WithRecords:
    def evaluate(*_: Any, **__: Any) -> tuple[Condition, ...]:
        return (recordings.condition(),)

    monkeypatch.setattr(certify, "evaluate", evaluate)
    monkeypatch.setattr(offline, "evaluate", evaluate)
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    return WithRecords(tmp_path)


def run(session: Any, **wishes: Any) -> Report:
    return Flow(session, recordings.case(), recordings.info(), Wishes(**wishes)).run()


def compare(session: Scripted) -> Report:
    return Offline((), "derived").run(session.directories).report


def faults(report: Report) -> list[tuple[str, Any, Any]]:
    return [(one.path, one.side, one.evidence.get("fault")) for one in report.findings]


# ------------------------------------------------------------------------------------------------------- judging


def test_right_indices_are_silent_and_counted(session: WithRecords) -> None:
    report = run(session)
    assert (report.verdict, report.findings) == ("aligned", ())
    assert {role: (one.observable, one.faults, one.runs) for role, one in report.ledgers.items()} == dict.fromkeys(
        SIDES, (True, 0, (1, 2, 3))
    )
    assert "audit" in report.seconds


def test_a_wrong_index_is_a_divergence_although_no_tensor_differs(session: WithRecords) -> None:
    session.faults["reference"] = ("F01", "F01", "F01", "F01")
    report = run(session)
    assert report.verdict == "diverged" and faults(report) == [("A", "reference", "wrong_slot")]
    (finding,) = report.findings
    assert finding.evidence["recorded_run"] == 3 and finding.evidence["phases"]["onset"] is not None
    assert report.transplants == ()  # a transplant puts tensors in place, and no index


def test_recordings_say_the_same_wherever_they_are(session: WithRecords, tmp_path: Path) -> None:
    session.faults["candidate"] = ("", "", "F02", "F02")
    joint = run(session)
    for role in SIDES:
        kept = sorted(path.name for path in (session.directories[role] / "trace" / FOLDER).iterdir())
        assert kept == ["rank0.bin", "rank0.jsonl", "run1.json", "run2.json", "run3.json"]
    moved = {role: path.rename(tmp_path / f"moved-{role}") for role, path in session.directories.items()}
    for role, path in moved.items():
        (path / "trace").rename(path / "another name")
        session.directories[role] = path / "another name"
    again = compare(session)
    assert faults(again) == faults(joint) == [("A", "candidate", "padding_write")]
    assert again.ledgers == joint.ledgers


def test_the_request_alone_is_judged_by_its_own_run(session: WithRecords) -> None:
    session.faults["candidate"] = ("F01", "F01", "F01", "")
    report = run(session)
    assert report.alone is not None and not report.alone.reproduced
    session.faults["candidate"] = ("F01", "F01", "F01", "F01")
    session.outcome.sides["candidate"].captures.clear()
    again = run(session)
    assert again.alone is not None and again.alone.reproduced


def test_without_records_nothing_breaks_and_nothing_is_known(session: WithRecords) -> None:
    session.audit = False
    report = run(session)
    assert report.verdict == "aligned"
    assert all(not one.observable and one.unseen == (NO_RECORDS,) for one in report.ledgers.values())
    assert compare(session).ledgers == report.ledgers


def test_a_value_fault_is_path_b_alone(session: WithRecords) -> None:
    def twice(phase: str, step: int, tensors: dict[str, Any]) -> None:
        tensors["layers.1.attn.out"] = tensors["layers.1.attn.out"] * 2

    session.edits["candidate"] = twice
    report = run(session)
    assert report.findings and {one.path for one in report.findings} == {"B"}


# ----------------------------------------------------------------------------------------------------- unstable


def unstable(session: WithRecords) -> None:
    session.runs["candidate"]["again"] = recordings.generations({"r0": (1, 9), "r1": (3, 4)})


def test_an_engine_that_does_not_repeat_itself_for_its_indices_diverges(session: WithRecords) -> None:
    unstable(session)
    session.faults["candidate"] = ("", "F01", "F01", "F01")
    report = run(session)
    assert report.verdict == "diverged" and faults(report) == [("A", "candidate", "wrong_slot")]
    assert any("request r0, token 1 was" in remark for remark in report.remarks)
    assert set(report.ledgers) == {"candidate"} and "record" not in session.stages and report.tensors is None


def test_a_fault_of_the_first_run_alone_explains_it_too(session: WithRecords) -> None:
    unstable(session)
    session.faults["candidate"] = ("F01", "", "", "")
    (finding,) = run(session).findings
    assert finding.evidence["elsewhere"] and "(run 1)" in finding.summary


@pytest.mark.parametrize(("candidate", "reference"), [("", ""), ("", "F01"), ("A-37", "")])
def test_otherwise_it_is_refused_as_before(session: WithRecords, candidate: str, reference: str) -> None:
    """Right indices, those of the other side, or such as harm nothing."""
    unstable(session)
    session.faults["candidate"], session.faults["reference"] = (candidate,) * 4, (reference,) * 4
    with pytest.raises(UserError, match="does not repeat itself"):
        run(session)


# -------------------------------------------------------------------------------------------------------- files


def test_an_earlier_copy_is_replaced(tmp_path: Path) -> None:
    work, trace = tmp_path / "work", tmp_path / "trace"
    trace.mkdir()
    keep_records(work, trace)
    assert not (trace / FOLDER).exists()
    leave(work / FOLDER, launch([toy()], ("trace",)))
    (trace / FOLDER).mkdir()
    (trace / FOLDER / "rank7.jsonl").touch()
    assert keep_and_audit({"candidate": work}, {"candidate": trace})["candidate"].runs == (1,)
    assert sorted(path.name for path in (trace / FOLDER).iterdir()) == ["rank0.bin", "rank0.jsonl", "run1.json"]


def test_a_copy_taken_while_the_worker_goes_on_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines first: what a line names is in the tensors that are copied after it."""
    order: list[str] = []
    copied: Callable[[Any, Any], Any] = __import__("shutil").copyfile

    def copyfile(source: Path, target: Path) -> None:
        order.append(source.suffix)
        copied(source, target)

    monkeypatch.setattr("align.run.records.shutil.copyfile", copyfile)
    leave(tmp_path / "work" / FOLDER, launch([toy()], ("trace",)))
    (tmp_path / "trace").mkdir()
    keep_records(tmp_path / "work", tmp_path / "trace")
    assert order[-1] == ".bin" and len(order) == 3


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    leave(tmp_path / "work" / FOLDER, launch([toy()], ("trace",)))
    (tmp_path / "trace").mkdir()
    monkeypatch.setattr("align.run.records.shutil.copyfile", full)
    with pytest.raises(UserError, match="no space is left"):
        keep_records(tmp_path / "work", tmp_path / "trace")
