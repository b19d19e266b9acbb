"""What the report says of a paired run, in both languages, and in the section of the verification."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.report.document import render
from align.report.paired import lines
from align.result.pair import Earlier, paired_with
from align.result.schema import Result
from tests.unit.align.result import made


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, Result]:
    """Diverged, aligned."""
    wrong = made.Run(tmp_path / "wrong", monkeypatch, made.wrong_up).go().result()
    return wrong, made.Run(tmp_path / "right", monkeypatch).go().result()


def shown(earlier: Result | None, now: Result, lang: str = "en") -> str:
    text = render(now.model_copy(update={"paired": paired_with(Earlier("first_run", earlier), now)}), lang)
    return text.split(f"## {'Verification' if lang == 'en' else '修复验证'}\n", 1)[1].split("\n## ", 1)[0]


def test_a_run_of_its_own_says_nothing(results: tuple[Result, Result]) -> None:
    assert list(lines(results[0])) == []
    assert "Paired" not in render(results[0]) and "对照" not in render(results[0], "zh")


def test_outcome_what_is_gone_and_what_it_rests_on(results: tuple[Result, Result]) -> None:
    wrong, right = results
    text = shown(wrong, right)
    assert text.startswith("\n* Paired run: mended: first_run showed path B: ")
    assert "* Found in first_run and not here: path B: " in text
    assert "* So the pair is inconclusive" in text, "nothing was changed"
    assert "* Precision: passed" in text
    assert "已修复" in shown(wrong, right, "zh") and "因此该对照不能下结论" in shown(wrong, right, "zh")


def test_what_should_be_alike_has_both_values(results: tuple[Result, Result]) -> None:
    wrong, _ = results
    other = wrong.model_copy(update={"versions": {**wrong.versions, "candidate": {"x|y": "1.0"}}})
    text = shown(other, wrong)
    assert "* Should be alike and is not: version candidate x\\|y: before 1.0, now nothing" in text
    assert "本应相同却不同：版本 candidate x\\|y：之前为 1.0，现在为 无" in shown(other, wrong, "zh")


def test_an_earlier_run_of_which_nothing_is_known(results: tuple[Result, Result]) -> None:
    text = shown(None, results[1])
    assert "* Paired run: unknown: first_run is not comparable: it left no result\n" in text
    assert "inconclusive" not in text
