"""Sentences of the report in each language, by key; ``templates/words.LANGUAGE.toml`` holds them, and
``page.LANGUAGE.toml`` those that the page alone says."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from align.sentences import LANGUAGES, counted, is_said, text_of

__all__ = ["LANGUAGES", "TEMPLATES", "Words", "words_of"]

#: Directory of the templates and words.
TEMPLATES = Path(__file__).with_name("templates")


class _Filler(Formatter):
    """``{rows:n row}`` is ``1 row`` or ``4 rows``, as in :mod:`align.sentences.said`."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec.startswith("n "):
            return counted(value, format_spec.removeprefix("n "))
        return super().format_field(value, format_spec)


class Words:
    """One language. Calling it fills a sentence: ``words("found.conditions", ok=30, total=31, others="-")``. A value
    that is a sentence itself (:mod:`align.sentences`) is read in the same language.

    Raises:
        KeyError: no such key, or a value that the sentence needs is not given.
    """

    def __init__(self, language: str) -> None:
        self.language = language
        content: dict[str, dict[str, str]] = {}
        for name in ("words", "page"):
            content |= tomllib.loads((TEMPLATES / f"{name}.{language}.toml").read_text(encoding="utf-8"))
        self.sentences: Mapping[str, str] = {
            f"{group}.{key}": sentence for group, sentences in content.items() for key, sentence in sentences.items()
        }

    def __call__(self, key: str, /, **values: Any) -> str:
        read = {name: text_of(value, self.language) if is_said(value) else value for name, value in values.items()}
        return _Filler().vformat(self.sentences[key], (), read)

    def has(self, key: str) -> bool:
        return key in self.sentences

    def word(self, group: str, text: str) -> str:
        """The word for a value of a fixed set; the value itself if it is none of them."""
        return self.sentences.get(f"{group}.{text}", text)


@cache
def words_of(language: str) -> Words:
    """The words of ``en`` or ``zh``."""
    assert language in LANGUAGES, language
    return Words(language)
