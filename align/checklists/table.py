"""The items of the three checklists, from ``items.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

#: Beginning of an item's id → its list.
ListName = Literal["quick", "alignment", "troubleshooting"]
_LISTS: dict[str, ListName] = {"000-Q": "quick", "003-CK-": "alignment", "003-TS-": "troubleshooting"}


@dataclass(frozen=True)
class Text:
    """One text in English and Chinese."""

    en: str
    zh: str

    def of(self, language: str) -> str:
        return self.en if language == "en" else self.zh


@dataclass(frozen=True)
class Item:
    """One item.

    Attributes:
        id: row of its seed.
        list: its list.
        number: in the list, from 1, as in the seed.
        text: what must hold; of troubleshooting what may show.
        decides: fields of ``result.json`` that decide it.
        rules: of :mod:`align.fa`, where attention's arguments decide it as well.
        mend: key of the sentence that says what would make it observable.
    """

    id: str
    list: ListName
    number: int
    text: Text
    decides: tuple[str, ...]
    rules: tuple[str, ...]
    mend: str


@dataclass(frozen=True)
class List:
    """One list.

    Attributes:
        source: the document.
        title: its name.
        about: what a failed item means.
    """

    name: ListName
    source: str
    title: Text
    about: Text


@cache
def _content() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("items.toml").read_text(encoding="utf-8"))


@cache
def items() -> Mapping[str, Item]:
    """Id → item, in the order of the seeds."""
    return {name: _item(name, one) for name, one in _content()["item"].items()}


def _item(name: str, one: Mapping[str, Any]) -> Item:
    prefix, found = next((prefix, found) for prefix, found in _LISTS.items() if name.startswith(prefix))
    return Item(
        name,
        found,
        int(name.removeprefix(prefix)),
        Text(*one["text"]),
        tuple(one["decides"]),
        tuple(one.get("rules", ())),
        one["mend"],
    )


@cache
def lists() -> Mapping[ListName, List]:
    """Name → list, in order."""
    content = _content()["list"]
    return {
        name: List(name, content[name]["source"], Text(*content[name]["title"]), Text(*content[name]["about"]))
        for name in _LISTS.values()
    }
