"""``align runs``: what is listed, what is chosen, and that nothing goes without being asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from align.cli import runs
from align.errors import UserError
from align.run.directory import RunDirectory
from align.run.earlier import earlier_runs

Align = Callable[..., tuple[int, str, str]]
REFUSED = {"verdict": "not comparable", "reason": "--confirm candidate:layers.9.mlp.up\n is not possible " + "x" * 200}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three runs in the cache that ``align`` uses."""
    place = tmp_path / "home" / "runs"
    for days, name, result in (
        (1, "20260103-qwen3", {"verdict": "diverged"}),
        (5, "20260102-qwen3", REFUSED),
        (9, "20260101-qwen3", {"verdict": "aligned"}),
    ):
        (place / name).mkdir(parents=True)
        (place / name / "case.json").write_text(json.dumps({"model": "/models/tiny"}))
        (place / name / "request.json").write_text("{}")
        started = (datetime.now().astimezone() - timedelta(days=days)).isoformat()
        (place / name / "result.json").write_text(json.dumps({**result, "timing": {"started": started}}))
        (place / name / "tokens.json").write_text("x" * 10**6)
    return place


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_the_list(align: Align, place: Path) -> None:
    code, out, err = align("runs")
    assert (code, err) == (0, "")
    head, first, second, third, total, hint = out.splitlines()
    assert head.split() == ["name", "started", "model", "state", "size", "reason"]
    assert [line.split()[0] for line in (first, second, third)] == names(place)[::-1]
    at = head.index("state")
    assert [line[at:].split()[0] for line in (first, second, third)] == ["diverged", "refused", "aligned"]
    assert "tiny" in first and "1 MB" in first
    assert second.endswith(" ".join(REFUSED["reason"].split())), "in a pipe nothing is cut"
    assert total == f"3 runs, 3 MB in {place}"
    assert hint == "next: align runs --remove --refused  # frees 1 MB"


def test_the_list_for_programs(align: Align, place: Path) -> None:
    found = json.loads(align("runs", "--json")[1])
    assert found["directory"] == str(place)
    assert [run["name"] for run in found["runs"]] == names(place)[::-1]
    refused = found["runs"][1]
    assert (refused["state"], refused["reason"]) == ("refused", REFUSED["reason"])
    assert (refused["model"], refused["can_be_resumed"]) == ("/models/tiny", True)
    assert 10**6 <= refused["bytes"] < 11 * 10**5


def test_the_list_fits_a_terminal(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(place.parent))
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None, width=80)
    runs.show(console, [runs.Row(run, 10**6) for run in earlier_runs()], 3)
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert " …" in text.getvalue()


def test_no_run(align: Align, tmp_path: Path) -> None:
    assert align("runs")[:2] == (0, f"there is no run in {tmp_path / 'home' / 'runs'}\n")


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        (["20260103-qwen3", "20260101-qwen3"], ["20260102-qwen3"]),
        (["--refused"], ["20260101-qwen3", "20260103-qwen3"]),
        (["--older-than", "3d"], ["20260103-qwen3"]),
        (["--older-than", "1w"], ["20260102-qwen3", "20260103-qwen3"]),
        (["--older-than", "120h", "20260103-qwen3"], ["20260101-qwen3", "20260102-qwen3", "20260103-qwen3"]),
    ],
)
def test_what_is_chosen_goes(align: Align, place: Path, choice: list[str], left: list[str]) -> None:
    assert align("runs", *choice)[0] == 0
    assert len(names(place)) == 3, "without --remove nothing is removed"
    code, out, _ = align("runs", "--remove", *choice, "--yes")
    assert (code, names(place)) == (0, left)
    gone = 3 - len(left)
    assert out == (f"removed {gone} run{'s'[: gone - 1]}, {gone} MB\n" if gone else "nothing to remove: no run fits\n")


def test_nobody_can_be_asked(align: Align, place: Path) -> None:
    code, out, err = align("runs", "--remove", "--refused")
    assert code == 2
    assert "20260102-qwen3" in out
    assert "error: 1 run, 1 MB would be removed, and nobody can be asked" in err
    assert "next: add --yes" in err
    assert json.loads(align("runs", "--remove", "--refused", "--json")[1])["exit"] == 2
    assert len(names(place)) == 3


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 2), ("", 2, 3), ("n", 2, 3)])
def test_the_question(
    align: Align, place: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, left: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(runs, "is_terminal", lambda: True)

    def ask(text: str) -> str:
        asked.append(text)
        return answer

    monkeypatch.setattr("builtins.input", ask)
    assert align("runs", "--remove", "20260102-qwen3")[0] == code
    assert (asked, len(names(place))) == (["remove 1 run, 1 MB? [y/N] "], left)


def test_a_run_that_is_in_use_stays(align: Align, place: Path) -> None:
    with closing(RunDirectory.reopen(place / "20260102-qwen3")):
        code, out, _ = align("runs", "--remove", "20260102-qwen3", "--yes")
        assert (code, out) == (2, "kept 20260102-qwen3: it is running\n")
        found = json.loads(align("runs", "--remove", "--older-than", "1h", "--yes", "--json")[1])
        assert found["kept"] == {"20260102-qwen3": "it is running"}
        assert found["removed"] == ["20260103-qwen3", "20260101-qwen3"]
    assert names(place) == ["20260102-qwen3"]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["2026010-qwen3"], "there is no run called 2026010-qwen3", "did you mean 2026010"),
        (["../home/runs"], "there is no run called ../home/runs", "align runs lists them"),
        (["--remove"], "nothing was chosen", "--older-than 7d"),
        (["--older-than", "7"], "--older-than 7 is no age", "for example --older-than 7d"),
        (["--older-than", "999999999999w"], "is older than any run", "7d"),
    ],
)
def test_refusals(align: Align, place: Path, arguments: list[str], error: str, hint: str) -> None:
    code, _, err = align("runs", *arguments)
    assert code == 2
    assert error in err.splitlines()[0]
    assert hint in err.splitlines()[1]
    assert len(names(place)) == 3


def test_a_whole_path_is_a_name(align: Align, place: Path) -> None:
    assert align("runs", "--remove", "--yes", f"{place / '20260102-qwen3'}/")[0] == 0
    assert names(place) == ["20260101-qwen3", "20260103-qwen3"]


def test_ages() -> None:
    assert runs.age("36 h") == timedelta(hours=36)
    assert runs.age("2W") == timedelta(weeks=2)
    with pytest.raises(UserError):
        runs.age("-1d")
