"""The kinds of faults that fits tell apart, read from ``kinds.tsv``, which is their only home."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

_FIELDS = ["kind", "result", "path", "more_general", "en", "zh", "check_en", "check_zh"]


@dataclass(frozen=True)
class FaultKind:
    """One row.

    Attributes:
        name: of the kind.
        result: ``fit``: reproduces the recorded result; ``pattern``: describes an error that nothing reproduces.
        path: of findings, see :data:`align.findings.PATHS`.
        more_general: kinds that say less or the same in other words; they are left out behind this one.
        en, zh: what it is, one sentence.
        check_en, check_zh: what to check.
        index: place in the table; of two equally simple explanations the earlier one comes first.
    """

    name: str
    result: Literal["fit", "pattern"]
    path: str
    more_general: tuple[str, ...]
    en: str
    zh: str
    check_en: str
    check_zh: str
    index: int

    def sentence(self, language: Literal["en", "zh"]) -> str:
        """What it is."""
        return self.en if language == "en" else self.zh

    def check(self, language: Literal["en", "zh"]) -> str:
        """What to check."""
        return self.check_en if language == "en" else self.check_zh


@lru_cache(maxsize=1)
def kinds() -> Mapping[str, FaultKind]:
    """All rows, by name, in order."""
    lines = Path(__file__).with_name("kinds.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split("\t") == _FIELDS, lines[0]
    found: dict[str, FaultKind] = {}
    for index, line in enumerate(lines[1:]):
        name, result, path, general, en, zh, check_en, check_zh = line.split("\t")
        assert result in ("fit", "pattern") and name not in found, line
        found[name] = FaultKind(
            name,
            "fit" if result == "fit" else "pattern",
            path,
            tuple(one for one in general.split(",") if one),
            en,
            zh,
            check_en,
            check_zh,
            index,
        )
    return found
