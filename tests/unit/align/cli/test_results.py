"""What ``align run`` and ``align compare`` leave for programs and people, without engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.base import SIDES
from align.case.build import NewCase
from align.cli import interview
from align.cli import run as run_module
from align.errors import SideError
from align.result.schema import Result, json_schema, without_times
from align.run import certify, offline
from tests.unit.align.result import made
from tests.unit.align.run import recordings

Align = Callable[..., tuple[int, str, str]]


class Setup:
    """How the next run goes."""

    edit: Any = None
    condition = recordings.condition()
    failure: BaseException | None = None


@pytest.fixture
def setup() -> Setup:
    return Setup()


@pytest.fixture
def align(align: Align, monkeypatch: pytest.MonkeyPatch, setup: Setup) -> Align:
    """Runs ``align …`` in this process; the sides are :class:`recordings.Scripted`."""
    monkeypatch.setattr(run_module, "_case", lambda *_: (recordings.info(), NewCase(recordings.case(), ())))
    monkeypatch.setattr(run_module, "check_device", lambda *_: None)
    sides = {role: SimpleNamespace(engine=engine) for role, engine in recordings.ENGINES.items()}
    monkeypatch.setattr(run_module, "interpreters_for", lambda *_: sides)
    for module in (certify, offline):
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: (setup.condition,))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})

    def session(case: Any, info: Any, interpreters: Any, directory: Path, *_: Any, **__: Any) -> Any:
        scripted = recordings.Scripted(directory)
        if setup.edit is not None:
            scripted.edits["candidate"] = setup.edit
        scripted.failure = setup.failure  # type: ignore[assignment]
        return scripted

    monkeypatch.setattr(run_module, "Session", session)

    return align


def result_in(directory: Path) -> Result:
    return Result.model_validate_json((directory / "result.json").read_text())


def test_json_is_all_that_stdout_holds(align: Align, tmp_path: Path) -> None:
    code, out, err = align("run", "--json", "--out", str(tmp_path / "run"))
    assert code == 0
    assert out == (tmp_path / "run" / "result.json").read_text()
    assert json.loads(out)["verdict"] == "aligned"
    assert "aligned: lmdeploy and vllm" in err, "people still see the summary"
    code, out, err = align("run", "--json", "--quiet", "--out", str(tmp_path / "quiet"))
    assert (code, err) == (0, "")
    assert json.loads(out)["verdict"] == "aligned"


def test_the_same_run_twice_is_the_same_result(align: Align, tmp_path: Path, setup: Setup) -> None:
    setup.edit = made.wrong_up
    for name in ("one", "two"):
        assert align("run", "-q", "--out", str(tmp_path / name))[0] == 1
    one, two = (result_in(tmp_path / name) for name in ("one", "two"))
    assert one.environment != two.environment
    assert without_times(one) == without_times(two)


def test_a_run_that_could_not_compare_leaves_what_is_known(align: Align, tmp_path: Path, setup: Setup) -> None:
    setup.condition = recordings.condition("false")
    code, out, err = align("run", "--json", "-q", "--out", str(tmp_path / "run"), "--symptom", "NaN after 3 tokens")
    assert code == 2
    assert "next: " in err
    found = json.loads(out)
    assert (found["verdict"], found["next"] != "") == ("not comparable", True)
    assert found["conditions"][0]["blocks"] is True
    assert next(fact for fact in found["facts"] if fact["name"] == "symptom")["value"] == "NaN after 3 tokens"
    assert {"case.json", "run.json", "result.json", "report.md"} <= {path.name for path in (tmp_path / "run").iterdir()}
    assert "Not comparable" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (SideError("candidate", "the candidate died", "read its log"), 2, "the candidate died"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("by zero"), 2, "a defect of align: ZeroDivisionError: by zero"),
    ],
)
def test_whatever_ends_a_run_is_in_its_result(
    align: Align, tmp_path: Path, setup: Setup, error: BaseException, code: int, reason: str
) -> None:
    setup.failure = error
    assert align("run", "-q", "--out", str(tmp_path / "run"))[0] == code
    found = result_in(tmp_path / "run")
    assert (found.verdict, found.reason) == ("not comparable", reason)
    assert any(step.state == "stopped" for step in found.walk)


def test_a_result_that_cannot_be_written_does_not_hide_the_error(
    align: Align, tmp_path: Path, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.failure = SideError("candidate", "the candidate died", "read its log")
    monkeypatch.setattr("align.cli.leave.forms", lambda *_: 1 / 0)
    code, _, err = align("run", "-q", "--out", str(tmp_path / "run"))
    assert code == 2
    assert "error: the candidate died" in err
    assert "ZeroDivisionError" not in err


def test_refusals_before_anything_starts_are_results_too(align: Align, tmp_path: Path) -> None:
    code, out, err = align("run", "--json", "--policy", "mine", "--out", str(tmp_path / "run"))
    assert code == 2
    assert "--policy mine is not known" in json.loads(out)["reason"]
    assert "--policy mine is not known" in err
    assert not (tmp_path / "run").exists()
    for option, value in (("--lang", "fr"), ("--onset", "never"), ("--batching", "often")):
        assert f"{option} {value} is not known" in align("run", option, value)[2]


def test_the_report_is_written_and_rebuilt_in_either_language(align: Align, tmp_path: Path, setup: Setup) -> None:
    setup.edit = made.wrong_up
    run = tmp_path / "run"
    align("run", "-q", "--out", str(run), "--lang", "zh", "--onset", "later")
    chinese, english = (run / "report.zh.md").read_text(), (run / "report.md").read_text()
    assert "## 根因分析" in chinese
    assert "用户回答" in chinese
    assert "## Root cause" in english
    (run / "report.zh.md").unlink()
    told = "".join(f"report: {run / name}\n" for name in ("report.md", "report.html", "junit.xml"))
    assert align("report", str(run))[:2] == (0, told)
    assert not (run / "report.zh.md").exists()
    told = "".join(f"report: {run / name}\n" for name in ("report.zh.md", "report.zh.html", "junit.xml"))
    assert align("report", str(run), "--lang", "zh")[:2] == (0, told)
    assert (run / "report.zh.md").read_text() == chinese
    for name in ("report.html", "report.zh.html", "junit.xml"):
        left = (run / name).read_text()
        assert (
            align("report", str(run), "--lang", "zh" if "zh" in name else "en", "--out", str(tmp_path / name))[0] == 0
        )
        assert (tmp_path / name).read_text() == left
    code, out, _ = align("report", str(run / "result.json"), "--lang", "zh", "--out", "-")
    assert (code, out) == (0, chinese)
    assert (run / "report.md").read_text() == english


def test_reports_that_cannot_be(align: Align, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema_version": 2}')
    (tmp_path / "newer.json").write_text('{"schema_version": 7}')
    old = tmp_path / "old"
    old.mkdir()
    (old / "result.json").write_text('{"schema_version": 1, "verdict": "diverged"}')
    for name in ("case.json", "report.md"):
        (old / name).write_text("{}")
    for arguments, words in (
        ([str(tmp_path)], "result.json does not exist"),
        ([str(broken)], "is no result of this version"),
        ([str(tmp_path / "newer.json")], "was written by a newer version of align (its format is 7, here it is 2)"),
        ([str(old)], "was written by an older version of align (its format is 1, here it is 2)"),
        ([str(old)], f"next: read the report.md that it left beside it, or run the case again: align run --case {old}"),
        ([str(tmp_path), "--lang", "fr"], "--lang fr is not known"),
    ):
        code, _, err = align("report", *arguments)
        assert code == 2
        assert words in err
        assert "next: " in err
    align("run", "-q", "--out", str(tmp_path / "run"))
    code, _, err = align("report", str(tmp_path / "run"), "--out", str(broken / "x"))
    assert code == 2
    assert "cannot be written" in err


def test_compare_writes_the_same_form(align: Align, tmp_path: Path, setup: Setup) -> None:
    setup.edit = made.wrong_up
    run = tmp_path / "run"
    align("run", "-q", "--out", str(run))
    file = tmp_path / "found.json"
    assert align("compare", *(str(run / role) for role in SIDES), "--out", str(file), "-q")[0] == 1
    found, joint = Result.model_validate_json(file.read_text()), result_in(run)
    assert (found.source, joint.source) == ("compare", "run")
    for part in ("verdict", "findings", "tokens", "tensors", "coverage", "scope", "engines", "case", "weights"):
        assert getattr(found, part) == getattr(joint, part), part
    assert [step.stage for step in found.walk] == ["read", "conditions", "tokens", "audit", "compare", "diagnose"]
    assert found.details is not None
    assert found.details["tensors"]["checkpoints"]
    assert align("report", str(file), "--out", "-")[1].startswith("# Precision report")


def test_the_schema_is_printed(align: Align) -> None:
    code, out, err = align("schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == json_schema()


def test_interactive_needs_a_terminal_and_asks_there(
    align: Align, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = align("run", "--interactive", "--out", str(tmp_path / "none"))
    assert code == 2
    assert "--interactive asks on a terminal" in err
    answers = {question.name: f"my {question.name}" for question in interview.QUESTIONS if not question.choices}
    texts = {question.text: answers.get(question.name, "") for question in interview.QUESTIONS}
    monkeypatch.setattr(run_module, "is_terminal", lambda: True)
    monkeypatch.setattr(run_module, "ask_on_terminal", lambda text, default: texts.get(text, "") or default)
    assert align("run", "-q", "--interactive", "--out", str(tmp_path / "run"))[0] == 0
    facts = {fact.name: fact for fact in result_in(tmp_path / "run").facts}
    assert (facts["symptom"].status, facts["symptom"].value) == ("answered", "my symptom")
    assert facts["optimisation_stage"].value == "my stage"
    assert facts["onset"].status == "derived"
    assert (facts["model"].status, facts["layout"].status) == ("answered", "answered")
