"""The same case gives the same result; what belongs to one run alone is kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.result.build import program_versions, repeatable
from align.result.plain import plain, without_directory
from align.result.schema import without_times
from tests.unit.align.result import made
from tests.unit.align.run import recordings


def test_two_runs_of_a_case_differ_in_times_and_paths_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, pause in (("one", 1.0), ("two", 2.0)):
        run = made.Run(tmp_path / name, monkeypatch, made.wrong_up).go()
        run.report.seconds["launch"] += pause
        found.append(
            run.result(argv=("/some/where/align", "run", "--out", str(tmp_path / name), "--policy", "derived"))
        )
    first, second = found
    assert first.timing != second.timing
    assert first.environment.directory != second.environment.directory
    assert without_times(first) == without_times(second)
    assert str(tmp_path) not in str(without_times(first))


def test_a_reason_names_the_run_and_not_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch).go()
    run.report.reason = f"see {tmp_path / 'run' / 'candidate'}/engine.log"
    assert run.result().reason == "see RUN/candidate/engine.log"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/x/__main__.py", "run", "--out", "/a", "-q"], ["align", "run", "-q"]),
        (["align", "run", "--out=/a", "--tp", "2"], ["align", "run", "--tp", "2"]),
        (["align", "run", "--out"], ["align", "run"]),
        ([], []),
    ],
)
def test_the_command_without_its_place(argv: list[str], said: list[str]) -> None:
    assert repeatable(argv) == said


def test_this_program_says_its_version() -> None:
    assert program_versions()["align"].count(".") == 2
    assert program_versions()["python"].startswith("3.11.")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1: (float("inf"), float("nan"))}, {"1": ["inf", "nan"]}),
        ({"a": {3, 1, 2}}, {"a": [1, 2, 3]}),
        ([True, None, 1, 1.5, "x"], [True, None, 1, 1.5, "x"]),
        (Path("/a"), "/a"),
    ],
)
def test_plain_values(value: Any, said: Any) -> None:
    assert plain(value) == said


def test_the_directory_is_replaced_everywhere() -> None:
    assert without_directory({"a": ["x /r/1 y", 1], "b": "/r/2"}, Path("/r/1")) == {"a": ["x RUN y", 1], "b": "/r/2"}
    assert without_directory("/r/1", None) == "/r/1"


def test_the_weights_audit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch)
    base = {"kind": "mlp.up", "layer": 0, "live": "", "rank": 0, "rows": [], "rows_total": 0, "max_abs": 0.0, "why": ""}
    run.session.weights["candidate"] = [
        {**base, "parameter": f"p{index}", "status": status}
        for index, status in enumerate(("equal", "equal", "not observable"))
    ]
    audit = run.go().result().weights["candidate"]
    assert (audit.equal, audit.differs, audit.not_observable) == (2, 0, ["p2"])


def test_tokens_are_counted_up_to_the_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch)
    for name in ("free", "again"):
        run.session.runs["candidate"][name] = recordings.generations({"r0": (1, 9), "r1": (3, 4)})
    tokens = run.go().result().tokens
    assert tokens is not None
    assert {one.request: (one.equal, one.total) for one in tokens.free.requests} == {"r0": (1, 2), "r1": (2, 2)}
    assert tokens.first is not None
    assert (tokens.first.request, tokens.first.index, tokens.first.position) == ("r0", 1, 4)
