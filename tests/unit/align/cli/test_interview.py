"""Asking on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from align.cli.interview import QUESTIONS, answers_of, interview
from align.errors import UserError


def ask_from(answers: Iterator[str], asked: list[str]) -> object:
    def ask(text: str, default: str) -> str:
        asked.append(text)
        return next(answers) or default

    return ask


def test_only_what_was_not_given_is_asked() -> None:
    asked: list[str] = []
    answers = iter(["fell by 2", "later", "", "fused norm"])
    found = interview({"baseline": "GPU", "model": "qwen3"}, True, ask_from(answers, asked), True)  # type: ignore[arg-type]
    assert found == {"symptom": "fell by 2", "onset": "later", "stage": "fused norm"}
    assert len(asked) == 4


def test_the_case_is_asked_for_too_if_there_is_none() -> None:
    asked: list[str] = []
    answers = iter(["", "", "2", *[""] * len(QUESTIONS)])
    found = interview({}, False, ask_from(answers, asked), True)  # type: ignore[arg-type]
    assert found == {"model": "qwen3", "dtype": "bfloat16", "tp": "2"}


def test_an_answer_that_is_none_of_the_choices_is_asked_again() -> None:
    asked: list[str] = []
    given = {"symptom": "s", "batching": "single", "stage": "s", "baseline": "b"}
    found = interview(given, True, ask_from(iter(["perhaps", "first"]), asked), True)  # type: ignore[arg-type]
    assert found == {"onset": "first"}
    assert asked[1].startswith("perhaps is none of first, later")


def test_nobody_to_ask() -> None:
    with pytest.raises(UserError, match="there is none") as caught:
        interview({}, True, lambda text, default: pytest.fail("asked"), False)
    assert "--symptom TEXT" in caught.value.hint


def test_options_are_answers() -> None:
    answers = answers_of({"symptom": " x ", "onset": "first", "batching": None}, True, False)
    assert (answers.symptom, answers.onset, answers.batching, answers.stage) == ("x", "first", "", "")
    assert (answers.model, answers.layout) == (True, False)
    for name in ("onset", "batching"):
        with pytest.raises(UserError, match=f"--{name} never is not known"):
            answers_of({name: "never"}, False, False)
