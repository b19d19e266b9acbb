"""Sentences as data: the same in both languages, read from numbers that are kept."""

from __future__ import annotations

import json
import re
from string import Formatter

import pytest

from align.sentences import LANGUAGES, counted, is_said, raw, said, sentences, text_of, told
from envs.home import REPOSITORY

CHINESE = re.compile(r"[\u4e00-\u9fff]")
PLACE = said("place.row", request="r2", position=9)
#: Sentences without a word of their own.
WORDLESS = re.compile(r"^[^A-Za-z]*$")


def places(sentence: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(sentence) if name is not None}


def test_both_languages_say_the_same_things() -> None:
    english, chinese = (sentences(language).keyed for language in LANGUAGES)
    assert list(english) == list(chinese)
    for key, sentence in english.items():
        assert places(sentence) == places(chinese[key]), key
        assert not CHINESE.search(sentence), key
        own = re.sub(r"\{[^}]*\}|L2|rank|token|head|logprob|NaN", "", sentence.replace("ranks", "rank"))
        assert WORDLESS.match(own) or CHINESE.search(chinese[key]), key


def test_every_sentence_that_is_made_is_in_the_tables() -> None:
    made = set()
    for file in (REPOSITORY / "align").rglob("*.py"):
        made |= set(re.findall(r'\bsaid\(\s*"([\w.]+)"', file.read_text(encoding="utf-8")))
    assert len(made) > 80
    assert made <= sentences("en").keyed.keys()


def test_numbers_and_names_are_kept_and_read_in_either_language() -> None:
    gain = said("operator.gain", subject=PLACE, factor=1.0102345, limit=1.0066)
    assert gain["factor"] == 1.0102345
    again = json.loads(json.dumps(gain))
    assert text_of(again) == "r2 position 9 is 1.0102 times the exact result; rounding reaches 1.0066"
    assert text_of(again, "zh") == "r2 位置 9 为精确结果的 1.0102 倍；舍入至多达到 1.0066 倍"


def test_lists_of_sentences_are_joined_as_the_language_does() -> None:
    both = said("operator.finding", operator="linear", reasons=[PLACE, said("operator.whole")])
    assert text_of(both) == "linear: r2 position 9; the whole of it"
    assert text_of(both, "zh") == "linear：r2 位置 9；整个结果"


def test_words_of_a_fixed_set_are_translated_and_others_stay() -> None:
    own = said("host.own", side="candidate", value=0.00168)
    assert text_of(own) == "the candidate's own error there is 0.00168 relative L2"
    assert text_of(own, "zh").startswith("候选侧在该处")
    assert "somebody" in text_of(said("host.own", side="somebody", value=1.0), "zh")
    assert text_of(said("symptom.unstable", sides=["candidate", "reference"]), "zh") == "候选侧、参考侧不能重复自身"


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_json_cannot_hold_and_what_is_not_known(language: str) -> None:
    assert "inf" in text_of(said("operator.element", ratio="inf", allowed=4.08, at=""), language)
    assert "nan" in text_of(said("operator.element", ratio=float("nan"), allowed=4.08, at=""), language)
    assert "?" in text_of(said("operator.element", ratio=None, allowed=4.08, at=""), language)


def test_text_that_nobody_took_apart_is_a_quotation_in_chinese() -> None:
    assert text_of(told("a {b}")) == "a {b}"
    assert text_of(told("a {b}"), "zh") == "原文：a {b}"
    assert told(PLACE) is PLACE
    assert [is_said(one) for one in (raw("x"), {"say": 3}, {"text": "x"}, "x", None)] == [True, *[False] * 4]


def test_a_sentence_of_another_version_is_refused() -> None:
    with pytest.raises(KeyError):
        text_of({"say": "operator.of_the_future"})
    with pytest.raises(KeyError):
        text_of({"say": "operator.gain", "factor": 1.0})


def test_no_space_between_chinese_characters() -> None:
    everything = said("fit.factor", subject=said("fit.everything"), ratio=said("fit.number", value=1.5))
    assert text_of(everything, "zh") == "全部结果为期望值的 1.5 倍"
    assert text_of(said("fit.factor", subject=said("fit.one", what="channel", index=4), ratio="2"), "zh") == (
        "通道 4 为期望值的 2 倍"
    )


def test_counted_things_have_their_number() -> None:
    some = said("finding.weights", parameter="w", live="", rows_total=1, rows=[17], more="", holds="")
    assert text_of(some) == "w differs from the checkpoint in 1 row: 17"
    assert "in 3 rows" in text_of({**some, "rows_total": 3})
    assert text_of(some, "zh") == "w 与 checkpoint 有 1 行不同：17"
    assert [counted(one, "request") for one in (0, 1, "1", 2)] == ["0 requests", "1 request", "1 request", "2 requests"]
