"""``align checklist``: the checklists of a run as a table, evaluated anew from its result; or the items themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.checklists.evaluate import with_checklists
from align.checklists.table import items, lists
from align.cli.explain_names import record
from align.cli.output import columns, print_json
from align.errors import EXIT_ALIGNED, EXIT_DIVERGED, EXIT_NOT_COMPARABLE, UserError
from align.report import checklists
from align.report.document import language
from align.report.read import read_result
from align.report.words import words_of
from align.result.checklists import Checklist, ChecklistItem
from align.result.schema import Result
from align.run.directory import RESULT
from align.sentences import text_of

_HEAD = {
    "en": ("item", "state", "what must hold, or the trouble", "evidence, or what would show it"),
    "zh": ("项目", "状态", "要求或现象", "证据，或可观测的条件"),
}
_LISTED = {
    "en": ("item", "list", "what must hold", "decided by", "source"),
    "zh": ("项目", "清单", "要求", "判定依据", "来源"),
}
_STYLES = {"ok": "green", "failed": "bold red", "not observable": "yellow", "not applicable": "dim"}
#: What came first in a list is what needs a look.
_ORDER = ("failed", "not observable", "ok", "not applicable")


def execute(run: Path | None, listed: bool, lang: str, json: bool) -> int:
    """Print the lists and return the exit code: 1 if an item failed, 2 if nothing could be compared.

    Raises:
        UserError: no run, no result, or no such language.
    """
    lang = language(lang)
    if listed:
        return _list(lang, json)
    if run is None:
        raise UserError(
            "no run is named", "align checklist RUN; align runs lists them, align checklist --list the items"
        )
    result = with_checklists(read_result(run / RESULT if run.is_dir() else run))
    if json:
        print_json(
            {"verdict": result.verdict, "checklists": [one.model_dump(mode="json") for one in result.checklists]}
        )
    else:
        _show(result, lang)
    if any(one.counts["failed"] for one in result.checklists):
        return EXIT_DIVERGED
    return EXIT_NOT_COMPARABLE if result.verdict == "not comparable" else EXIT_ALIGNED


def _show(result: Result, lang: str) -> None:
    console = Console(emoji=False, highlight=False)
    for one in result.checklists:
        title = f"{lists()[one.name].title.of(lang)} ({lists()[one.name].source}): {_counts(one, lang)}"
        rows = sorted(one.items, key=lambda item: _ORDER.index(item.state))
        cells = [
            (item.id, _state(one, item.state, lang), items()[item.id].text.of(lang), _why(item, lang)) for item in rows
        ]
        if not console.is_terminal:
            print(f"{title}\n{columns([_HEAD[lang], *cells])}\n")
            continue
        console.print(Text(title, "bold"))
        table = Table(*_HEAD[lang], box=None, padding=(0, 2, 0, 0))
        for item, row in zip(rows, cells, strict=True):
            table.add_row(*(Text(cell, _STYLES[item.state] if at == 1 else "") for at, cell in enumerate(row)))
        console.print(table)
        console.print()


def _counts(one: Checklist, lang: str) -> str:
    return ", ".join(f"{count} {_state(one, state, lang)}" for state, count in one.counts.items() if count)


def _state(one: Checklist, state: str, lang: str) -> str:
    return words_of(lang)(checklists.state(one.name, state))


def _why(item: ChecklistItem, lang: str) -> str:
    what = text_of(item.told, lang)
    findings = f" [{', '.join(map(str, item.findings))}]" if item.findings else ""
    return f"{what}{findings}" if item.mend_told is None else f"{what}; → {text_of(item.mend_told, lang)}"


def _list(lang: str, json: bool) -> int:
    if json:
        print_json({"items": [record(one) for one in items().values()]})
        return EXIT_ALIGNED
    rows: list[tuple[str, ...]] = [
        (one.id, one.list, one.text.of(lang), _decided(one.decides, one.rules), lists()[one.list].source)
        for one in items().values()
    ]
    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        print(columns([_LISTED[lang], *rows]))
        return EXIT_ALIGNED
    table = Table(*_LISTED[lang], box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    return EXIT_ALIGNED


def _decided(decides: tuple[str, ...], rules: tuple[Any, ...]) -> str:
    return "; ".join((*decides, *([", ".join(rules)] if rules else [])))
