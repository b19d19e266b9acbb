"""Reading the table: one TOML file for each part of it, checked as a whole."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

from pydantic import ValidationError

from align.errors import UserError
from align.findings import PATHS
from align.knowledge.schema import Entry, FileGroup

_Model = TypeVar("_Model", Entry, FileGroup)

FILES = "files.toml"
PARTS = ("kinds.toml", "symptoms.toml", "traps.toml", "trouble.toml")
#: Where the rows of a seed come from, by the beginning of their ids.
SECTIONS = {
    "000-S2.1": "seed 000 §2.1",
    "000-T5.1": "seed 000 §5.1",
    "000-T5.2": "seed 000 §5.2",
    "000-T5.3": "seed 000 §5.3",
    "000-T5.4": "seed 000 §5.4",
    "000-K": "seed 000, other known problems",
    "001-SY": "seed 001 chapter 6",
    "002-X": "seed 002 §6",
    "003-SY": "seed 003 step 4, symptoms",
    "003-S4": "seed 003 step 4, advice",
    "003-TS": "seed 003, troubleshooting",
}


@dataclass(frozen=True)
class Knowledge:
    """The whole table: entries by id, in the order of the files, and groups of files by name."""

    entries: Mapping[str, Entry]
    groups: Mapping[str, FileGroup]

    def files(self, entry: Entry, lacks: Collection[str] = ()) -> tuple[str, ...]:
        """What to read for an entry, each file once; nothing that is there for what the model ``lacks`` alone."""
        groups = (self.groups[name] for name in entry.read)
        return tuple(dict.fromkeys(file for one in groups if one.needs not in lacks for file in one.files))

    def of_path(self, path: str) -> tuple[Entry, ...]:
        """Entries that name a path, those that name it first before the others."""
        named = [entry for entry in self.entries.values() if path in entry.paths]
        return tuple(sorted(named, key=lambda entry: entry.paths[0] != path))

    def find(self, text: str) -> tuple[Entry, ...]:
        """Entries for what a user typed: an id, a path, or words in either language.

        An id gives its entry alone. Words give the entries in whose titles all of them occur, or else in any text.

        Raises:
            UserError: there is none; the closest ids and words are named.
        """
        wanted = " ".join(text.split()).casefold()
        for entry in self.entries.values():
            if entry.id.casefold() == wanted:
                return (entry,)
        if wanted.upper() in PATHS:
            return self.of_path(wanted.upper())
        words = wanted.split()
        for told in (_titles, _everything):
            found = tuple(entry for entry in self.entries.values() if words and _all_in(words, told(entry)))
            if found:
                return found
        closest = self._closest(wanted)
        hint = f"closest: {', '.join(closest)}; " if closest else ""
        raise UserError(f"nothing is known about {text!r}", f"{hint}align explain lists everything")

    def _closest(self, wanted: str) -> list[str]:
        """Ids and words of titles that look like one that was typed."""
        known = {entry.id.casefold(): entry.id for entry in self.entries.values()}
        for entry in self.entries.values():
            for word in entry.title.en.casefold().replace(":", " ").replace(",", " ").split():
                if len(word) > 3:
                    known.setdefault(word, word)
        return [known[match] for match in get_close_matches(wanted, known, n=4, cutoff=0.6)]


def _titles(entry: Entry) -> str:
    return f"{entry.id} {entry.title.en} {entry.title.zh}".casefold()


def _everything(entry: Entry) -> str:
    return " ".join((entry.id, *(part for text in entry.texts() for part in (text.en, text.zh)))).casefold()


def _all_in(words: list[str], text: str) -> bool:
    return all(word in text for word in words)


@cache
def knowledge() -> Knowledge:
    """The table of this package."""
    return load(resources.files("align.knowledge"))


def load(folder: Traversable) -> Knowledge:
    """Read a folder with :data:`FILES` and :data:`PARTS`.

    Raises:
        ValueError: a file is not as the schema says, an id occurs twice, or a name leads nowhere. The message begins
            with the file and the entry.
    """
    groups = {name: _validated(FileGroup, FILES, name, plain) for name, plain in _parse(folder, FILES).items()}
    entries: dict[str, Entry] = {}
    for part in PARTS:
        for name, plain in _parse(folder, part).items():
            if name in entries:
                raise ValueError(f"{part}: {name} is there already")
            entries[name] = _validated(Entry, part, name, _with_origin(part, name, plain))
    for entry in entries.values():
        _check_names(entry, entries, groups)
    return Knowledge(entries, groups)


def _parse(folder: Traversable, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / file).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: {error}") from None


def _with_origin(part: str, name: str, plain: Any) -> Any:
    """A row of a seed says by its id where it comes from; a kind says it itself."""
    if not isinstance(plain, dict):
        raise ValueError(f"{part}: {name} is no table")
    section = SECTIONS.get(name.rpartition("-")[0])
    if section is None:
        return {**plain, "id": name}
    if "source" in plain:
        raise ValueError(f"{part}: {name} has its source in its id")
    return {**plain, "id": name, "source": section}


def _validated(model: type[_Model], file: str, name: str, plain: Any) -> _Model:
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{file}: {name}: {where}: {first['msg']}") from None


def _check_names(entry: Entry, entries: Mapping[str, Entry], groups: Mapping[str, FileGroup]) -> None:
    lost = [name for name in entry.read if name not in groups] + [name for name in entry.see if name not in entries]
    if lost:
        raise ValueError(f"{entry.id}: nothing is called {', '.join(lost)}")
    if entry.id in entry.see:
        raise ValueError(f"{entry.id} refers to itself")
