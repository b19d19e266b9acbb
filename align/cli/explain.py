"""``align explain``: what is known about a kind of fault, a row of the seeds, a checkpoint or operator, or a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.cli.explain_names import closest, lists, told
from align.cli.output import columns, print_json
from align.errors import EXIT_ALIGNED, UserError
from align.findings import PATHS
from align.knowledge import LANGUAGES, PATHS_ZH, Entry, Knowledge, Language, knowledge

_LABELS: dict[Language, tuple[str, ...]] = {
    "en": ("path", "symptom", "causes", "check", "treatment", "note", "read", "see", "guide"),
    "zh": ("路径", "症状", "可能原因", "检查", "处理", "说明", "阅读", "另见", "指南"),
}
_HEAD: dict[Language, tuple[str, str, str]] = {"en": ("path", "name", "what it is"), "zh": ("路径", "名称", "说明")}
#: What else is explained, by :func:`align.cli.explain_names.lists`.
_OTHERS: dict[Language, dict[str, str]] = {
    "en": {
        "checkpoints": "checkpoints",
        "groups": "groups of checkpoints",
        "operators": "operators",
        "fits": "errors that are fitted",
        "checklists": "items of checklists",
    },
    "zh": {
        "checkpoints": "检查点",
        "groups": "检查点组",
        "operators": "算子",
        "fits": "可识别的错误",
        "checklists": "清单项目",
    },
}
#: Labels whose lines begin with a name or a command and need no bullet.
_NAMES = {name for labels in _LABELS.values() for name in labels[6:8]} | {"next", "下一步"}


def execute(words: Sequence[str], lang: str, json: bool = False) -> int:
    """Print the entry, or a list of those that fit; without words the whole list.

    Raises:
        UserError: nothing fits, or no such language.
    """
    if lang not in LANGUAGES:
        raise UserError(f"no language {lang!r}", f"use one of: {', '.join(LANGUAGES)}")
    known = knowledge()
    text = " ".join(words)
    name = None if _is_entry(text, known) else told(text, known, lang)
    found = name.entries if name is not None else _found(text, known)
    if json:
        named = {} if name is None else {"named": name.record}
        print_json({"language": lang, **named, "entries": [_content(entry, known, lang) for entry in found]})
        return EXIT_ALIGNED
    console = Console(emoji=False, highlight=False)
    if name is not None:
        _show(console, name.name, name.title, name.labelled(lang))
    elif len(found) == 1:
        _show(console, found[0].id, found[0].title.of(lang), _parts(found[0], known, lang))
    else:
        _list(console, found, lang, text.upper())
        if not text:
            _others(console, lang)
    return EXIT_ALIGNED


def _is_entry(text: str, known: Knowledge) -> bool:
    """Nothing, or the id of an entry or a path."""
    wanted = " ".join(text.split()).casefold()
    return not wanted or wanted.upper() in PATHS or any(wanted == one.casefold() for one in known.entries)


def _found(text: str, known: Knowledge) -> tuple[Entry, ...]:
    """Entries that fit; without a text all.

    Raises:
        UserError: there is none; says what looks like it.
    """
    if not text:
        return tuple(known.entries.values())
    try:
        return known.find(text)
    except UserError as error:
        near = closest(text, known)
        if not near:
            raise
        raise UserError(error.message, f"closest: {', '.join(near)}; align explain lists everything") from None


def _content(entry: Entry, known: Knowledge, language: Language) -> dict[str, Any]:
    """An entry with its texts in one language; what it does not have is empty or null."""
    return {
        "id": entry.id,
        "paths": list(entry.paths),
        "title": entry.title.of(language),
        "symptom": entry.symptom.of(language),
        "causes": [text.of(language) for text in entry.causes],
        "checks": [text.of(language) for text in entry.checks],
        "treatment": entry.treatment.of(language),
        "note": None if entry.note is None else entry.note.of(language),
        "files": list(known.files(entry)),
        "see": list(entry.see),
        "source": entry.source,
    }


def _parts(entry: Entry, known: Knowledge, language: Language) -> list[tuple[str, tuple[str, ...]]]:
    """Labels with their lines; what an entry does not have is left out."""
    lines = (
        (entry.path_text(language),),
        (entry.symptom.of(language),),
        tuple(text.of(language) for text in entry.causes),
        tuple(text.of(language) for text in entry.checks),
        (entry.treatment.of(language),),
        () if entry.note is None else (entry.note.of(language),),
        known.files(entry),
        tuple(f"{name}: {known.entries[name].title.of(language)}" for name in entry.see),
        (entry.source,),
    )
    return [(label, said) for label, said in zip(_LABELS[language], lines, strict=True) if said]


def _show(console: Console, name: str, title: str, parts: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    if not console.is_terminal:  # for a file or another program: nothing is broken into lines
        lines = [f"{label}: {line}" if label else line for label, said in parts for line in said]
        print("\n".join([f"{name}: {title}", *lines]))
        return
    console.print(Text.assemble((name, "bold cyan"), "  ", (title, "bold")))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, said in parts:
        if not label:
            for line in said:
                console.print(Text(line), soft_wrap=True)
            continue
        bullet = "• " if len(said) > 1 and label not in _NAMES else ""
        table.add_row(label, Text("\n".join(bullet + line for line in said)))
    console.print(table)


def _list(console: Console, found: Sequence[Entry], language: Language, asked: str) -> None:
    """One line an entry, by the path that it names first; all under one path if that was asked for."""
    names = PATHS if language == "en" else PATHS_ZH
    if not console.is_terminal:
        cells = [(",".join(entry.paths), entry.id, entry.title.of(language)) for entry in found]
        print(columns([_HEAD[language], *cells]))
        used = {path for entry in found for path in entry.paths}
        print(f"{_HEAD[language][0]}: {', '.join(f'{path} {name}' for path, name in names.items() if path in used)}")
        return
    for path, name in names.items():
        rows = [entry for entry in found if path == (asked if asked in PATHS else entry.paths[0])]
        if not rows:
            continue
        console.print(Text.assemble((path, "bold"), f"  {name}"))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for entry in rows:
            others = " ".join(other for other in entry.paths if other != path)
            table.add_row(f"  {entry.id}", others, Text(entry.title.of(language)))
        console.print(table)


def _others(console: Console, language: Language) -> None:
    """The names besides the entries, a line a kind."""
    for kind, names in lists().items():
        label = _OTHERS[language][kind]
        if console.is_terminal:
            console.print(Text.assemble((label, "bold"), f": {', '.join(names)}"))
        else:
            print(f"{label}: {', '.join(names)}")
