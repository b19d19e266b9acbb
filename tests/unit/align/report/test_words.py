"""The report's sentences: the same in both languages, and filled with the same things."""

from __future__ import annotations

import re
from string import Formatter

import pytest

from align.conditions.table import TABLE
from align.report.words import LANGUAGES, TEMPLATES, words_of
from align.run.report import Report

CHINESE = re.compile(r"[\u4e00-\u9fff]")
#: Names and formats that both languages share.
SAME = {"found.launch", "value.eager", "label.ranks", "stage.tokens"}


def fields(sentence: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(sentence) if name is not None}


def test_both_languages_say_the_same_things() -> None:
    english, chinese = (words_of(language).sentences for language in LANGUAGES)
    assert list(english) == list(chinese)
    for key, sentence in english.items():
        assert fields(sentence) == fields(chinese[key]), key
        assert not CHINESE.search(sentence), key
        spoken = re.sub(r"\{\w+\}|[A-Za-z]", "", chinese[key])
        assert key in SAME or CHINESE.search(chinese[key]) or not re.search(r"\w", spoken), key


def test_every_key_of_the_template_is_there() -> None:
    used = set(re.findall(r'\bt\("([\w. ]+)"', (TEMPLATES / "report.md.jinja").read_text(encoding="utf-8")))
    assert used
    assert used <= words_of("en").sentences.keys()


def test_every_stage_has_its_words() -> None:
    report = Report()
    stages = [key.removeprefix("stage.") for key in words_of("en").sentences if key.startswith("stage.")]
    assert {"launch", "compare", "record again"} <= set(stages)
    for stage in stages:
        with report.timed(stage):
            assert words_of("en").has(f"why.{stage}")
    assert [move.stage for move in report.moves] == stages


def test_mends_are_those_of_the_conditions() -> None:
    said = {key.removeprefix("mend.") for key in words_of("en").sentences if key.startswith("mend.")}
    assert said == {row.mend for row in TABLE}


@pytest.mark.parametrize("group", ["mend", "hint"])
def test_a_text_that_is_its_own_key_says_itself(group: str) -> None:
    own = {key: text for key, text in words_of("en").sentences.items() if key.startswith(f"{group}.")}
    assert own
    assert all(key == f"{group}.{text}" for key, text in own.items())


def test_words_are_filled_or_refused() -> None:
    words = words_of("en")
    assert words("found.launch", engines="a {b}") == "a {b}"
    assert words("about.tokens", tokens=1) == "1 token"
    assert words("about.tokens", tokens="48") == "48 tokens"
    assert words.word("value", "first token") == "the first token, so prefill"
    assert words.word("value", "whatever the user said") == "whatever the user said"
    with pytest.raises(KeyError):
        words("found.launch")
    with pytest.raises(KeyError):
        words("found.nothing of the kind")
