"""``align runs``: what earlier runs came to, what they take, and the removal of those that are chosen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from align.cli.interview import is_terminal
from align.cli.output import columns, print_json
from align.doctor.types import gb
from align.errors import EXIT_ALIGNED, EXIT_NOT_COMPARABLE, UserError
from align.run.earlier import EarlierRun, State, earlier_runs, remove, runs_directory
from envs.survey import size

_COLUMNS = ("name", "started", "model", "state", "size", "reason")
_STYLES: dict[State, str] = {
    "running": "cyan",
    "aligned": "green",
    "diverged": "bold red",
    "interrupted": "yellow",
    "refused": "magenta",
    "failed": "yellow",
}
#: Characters of a reason that a terminal gets; everything else gets all.
_LONGEST = 110
_AGE = re.compile(r"(\d+)\s*([hdw])")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True)
class RunsSettings:
    """The options of ``align runs``."""

    names: tuple[str, ...] = ()
    refused: bool = False
    older_than: str | None = None
    remove: bool = False
    yes: bool = False
    json: bool = False


@dataclass(frozen=True)
class Row:
    """One run in the list, with the bytes that it takes on its disk."""

    run: EarlierRun
    bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        run = self.run
        model = run.model.rstrip("/").rpartition("/")[2] or "-"
        started = f"{run.started:%Y-%m-%d %H:%M}"
        return (run.name, started, model, run.state, gb(self.bytes), " ".join(run.reason.split()))

    def record(self) -> dict[str, object]:
        run = self.run
        return {
            "name": run.name,
            "path": str(run.path),
            "started": run.started.isoformat(timespec="seconds"),
            "model": run.model,
            "state": run.state,
            "reason": run.reason,
            "bytes": self.bytes,
            "can_be_resumed": run.resumable and run.state not in ("running", "aligned", "diverged"),
        }


def execute(settings: RunsSettings) -> int:
    """List or remove, and return the exit code: 2 if a run that was to go stays.

    Raises:
        UserError: no such run, an age that is none, nothing chosen, or no answer to the question.
    """
    found = earlier_runs()
    chosen = _chosen(found, settings)
    rows = [Row(run, size(run.path)) for run in chosen]
    if not settings.remove:
        if settings.json:
            print_json({"directory": str(runs_directory()), "runs": [row.record() for row in rows]})
        else:
            show(Console(emoji=False, highlight=False), rows, len(found))
        return EXIT_ALIGNED
    if not (settings.names or settings.refused or settings.older_than):
        raise UserError("nothing was chosen", "name runs, or choose them by --refused or --older-than 7d")
    return _remove(rows, settings)


def show(console: Console, rows: Sequence[Row], there: int) -> None:
    """One row a run, and what may be done next."""
    if not rows:
        print(f"there is no run in {runs_directory()}" if not there else f"none of {there} runs fits")
        return
    _table(console, rows)
    print(f"{_counted(rows)} in {runs_directory()}")
    refused = [row for row in rows if row.run.state == "refused"]
    if refused:
        print(f"next: align runs --remove --refused  # frees {gb(sum(row.bytes for row in refused))}")


def _table(console: Console, rows: Sequence[Row]) -> None:
    if not console.is_terminal:
        print(columns([_COLUMNS, *(row.cells for row in rows)]))
        return
    head, *lines = columns([_COLUMNS[:-1], *(row.cells[:-1] for row in rows)]).splitlines()
    console.print(Text(head, "bold"), soft_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        text = Text(line)
        text.highlight_words([f" {row.run.state} "], _STYLES[row.run.state])
        console.print(text, soft_wrap=True)
        if row.run.reason:
            reason = row.cells[-1]
            short = reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST - 2]} …"
            console.print(Padding(Text(short, "dim"), (0, 0, 0, 4)))


def _counted(rows: Sequence[Row]) -> str:
    return f"{len(rows)} run{'' if len(rows) == 1 else 's'}, {gb(sum(row.bytes for row in rows))}"


def _chosen(found: Sequence[EarlierRun], settings: RunsSettings) -> list[EarlierRun]:
    """Those that fit every option."""
    by_name = {run.name: run for run in found}
    for name in settings.names:
        if _own(name) not in by_name:
            close = get_close_matches(_own(name), by_name, n=3)
            raise UserError(
                f"there is no run called {name} in {runs_directory()}",
                f"did you mean {' or '.join(close)}?" if close else "align runs lists them",
            )
    names = {_own(name) for name in settings.names}
    before = None if settings.older_than is None else datetime.now().astimezone() - age(settings.older_than)
    return [
        run
        for run in found
        if (not names or run.name in names)
        and (not settings.refused or run.state == "refused")
        and (before is None or run.started < before)
    ]


def _own(name: str) -> str:
    """A run's name, also of its whole path."""
    return name.rstrip("/").removeprefix(f"{runs_directory()}/")


def age(text: str) -> timedelta:
    """``12h``, ``7d`` or ``4w``.

    Raises:
        UserError: anything else.
    """
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise UserError(f"--older-than {text} is no age", "give hours, days or weeks, for example --older-than 7d")
    try:
        return timedelta(**{_UNITS[match[2]]: int(match[1])})
    except OverflowError:
        raise UserError(f"--older-than {text} is older than any run", "give for example --older-than 7d") from None


def _remove(rows: Sequence[Row], settings: RunsSettings) -> int:
    running = [row for row in rows if row.run.state == "running"]
    going = [row for row in rows if row.run.state != "running"]
    if not settings.json:
        for row in running:
            print(f"kept {row.run.name}: it is running")
    if going and not settings.yes:
        _confirm(going, settings.json)
    removed: list[Row] = []
    kept = {row.run.name: "it is running" for row in running}
    for row in going:
        try:
            remove(row.run)  # whoever took it up meanwhile keeps it
        except UserError as error:
            kept[row.run.name] = error.message
            if not settings.json:
                print(f"kept {row.run.name}: {error.message}")
            continue
        removed.append(row)
    if settings.json:
        freed = sum(row.bytes for row in removed)
        print_json({"removed": [row.run.name for row in removed], "bytes": freed, "kept": kept})
    elif removed or not kept:
        print(f"removed {_counted(removed)}" if removed else "nothing to remove: no run fits")
    return EXIT_NOT_COMPARABLE if kept and settings.names else EXIT_ALIGNED


def _confirm(rows: Sequence[Row], json: bool) -> None:
    """Ask before anything is removed.

    Raises:
        UserError: nobody can be asked, or the answer is no.
    """
    if json or not is_terminal():
        if not json:
            _table(Console(emoji=False, highlight=False), rows)
        raise UserError(f"{_counted(rows)} would be removed, and nobody can be asked", "add --yes to remove them")
    _table(Console(emoji=False, highlight=False), rows)
    answer = input(f"remove {_counted(rows)}? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("nothing was removed", "answer y, or add --yes")
