"""The sentences of each language, by key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Sentences:
    """One language.

    Attributes:
        keyed: ``GROUP.KEY`` → sentence with places to fill.
        words: word of a fixed set → what it is in this language; English has none.
    """

    keyed: Mapping[str, str]
    words: Mapping[str, str]


@cache
def sentences(language: str) -> Sentences:
    """Of ``en`` or ``zh``."""
    assert language in LANGUAGES, language
    content = tomllib.loads(Path(__file__).with_name(f"{language}.toml").read_text(encoding="utf-8"))
    words = content.pop("words", {})
    keyed = {f"{group}.{key}": text for group, texts in content.items() for key, text in texts.items()}
    return Sentences(keyed, words)
