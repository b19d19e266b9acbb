"""The kinds of fault that the audit knows, from ``checks.toml``: source, scope, and whether tables alone show it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """One kind.

    Attributes:
        kind: its name; ``ledger.KIND`` is its sentence.
        of: ``static``: the record of one step shows it; ``ledger``: only writes and reads replayed do.
        rows: ids of the seeds' rows, of the public bugs' catalogue (``A-1``) and its faults (``F02``).
        scope: where the check holds.
        formula: what was expected.
    """

    kind: str
    of: str
    rows: tuple[str, ...]
    scope: str
    formula: str


@cache
def _content() -> Mapping[str, Mapping[str, Mapping[str, object]]]:
    return tomllib.loads(Path(__file__).with_name("checks.toml").read_text(encoding="utf-8"))


@cache
def checks() -> Mapping[str, Check]:
    """Kind → check, in order of the file."""
    return {
        kind: Check(kind, str(one["of"]), tuple(map(str, _list(one["rows"]))), str(one["scope"]), str(one["formula"]))
        for kind, one in _content()["check"].items()
    }


@cache
def left_out() -> Mapping[str, str]:
    """Rows of the seeds' cache sections that no check of this package covers → why."""
    return {row: str(one["why"]) for row, one in _content()["left_out"].items()}


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
