"""Where summaries are printed: on a terminal they fit its width, in a pipe every line is whole."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import IO, Any, cast

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

#: Columns of a console that no terminal reads: no line is that long, so none is broken or cut.
_ENDLESS = 100_000
#: Longer cells than this may be broken into lines on a terminal; shorter ones, such as names and numbers, may not.
_BREAKABLE = 24
_NOTHING = ("", "-")
_TRAILING = re.compile(r"[ \t]+(?=\n)")


def screen(quiet: bool = False, stderr: bool = False) -> Screen:
    """The console of a command that prints a summary.

    Args:
        quiet: print nothing.
        stderr: print on standard error; standard output is somebody else's.
    """
    # emoji: a text such as ":smile:" is shown as it is.
    console = Screen(quiet=quiet, stderr=stderr, emoji=False)
    if console.is_terminal:
        return console
    stream = cast("IO[str]", _Trimmed(sys.stderr if stderr else sys.stdout))
    return Screen(quiet=quiet, file=stream, width=_ENDLESS, emoji=False)


class Screen(Console):
    """A console whose tables fit it: first columns go that say nothing, then rows are stacked."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(fitted(self, one) if isinstance(one, Table) else one for one in objects), **options)

    def say(self, line: str) -> None:
        """A line as it is, which a terminal breaks where it ends."""
        self.print(line, markup=False, highlight=False, soft_wrap=True)


class _Trimmed:
    """A stream without blanks at the ends of lines; a table pads its last column with them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(_TRAILING.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fitted(console: Console, table: Table) -> RenderableType:
    """A table as it is if it fits; else without its empty columns; else one paragraph a row."""
    heads = [_text(console, column.header) for column in table.columns]
    cells = [[_text(console, cell) for cell in column.cells] for column in table.columns]
    if _width(heads, cells) <= console.width:
        return _folding(table)
    used = [index for index, column in enumerate(cells) if any(cell.plain not in _NOTHING for cell in column)]
    if _width([heads[index] for index in used], [cells[index] for index in used]) <= console.width:
        return _folding(_only(table, used, cells))
    rows = list(zip(*cells, strict=True))
    title = [] if table.title is None else [Text(str(table.title), style="italic")]
    return Group(*title, *(_stacked(heads, row) for row in rows))


def _text(console: Console, cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell), emoji=False, highlight=False)


def _width(heads: Sequence[Text], cells: Sequence[Sequence[Text]]) -> int:
    """Columns that a table needs at least, with two blanks between its own."""
    widest = [max(one.cell_len for one in (head, *column)) for head, column in zip(heads, cells, strict=True)]
    return sum(min(width, _BREAKABLE) + 2 for width in widest) - 2


def _folding(table: Table) -> Table:
    """With every cell whole: what does not fit goes on in the next line."""
    for column in table.columns:
        column.overflow = "fold"
    return table


def _only(table: Table, used: Sequence[int], cells: Sequence[Sequence[Text]]) -> Table:
    chosen = Table(title=table.title, title_justify=table.title_justify, box=table.box, pad_edge=table.pad_edge)
    for index in used:
        column = table.columns[index]
        chosen.add_column(column.header, justify=column.justify)
    for row in zip(*(cells[index] for index in used), strict=True):
        chosen.add_row(*row)
    return chosen


def _stacked(heads: Sequence[Text], row: Sequence[Text]) -> RenderableType:
    """The first cell, and below it what the others say, with the names of their columns."""
    said = [
        Text.assemble(head, " ", cell)
        for head, cell in zip(heads[1:], row[1:], strict=True)
        if cell.plain not in _NOTHING
    ]
    return Group(row[0], *([Padding(Text(" · ").join(said), (0, 0, 0, 2))] if said else []))
