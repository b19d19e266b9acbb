"""``align doctor``: what is missing on this machine, and the command that mends it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.cli.options import check_supported
from align.cli.output import columns, print_json
from align.doctor.examine import examine
from align.doctor.types import Check, Machine, Needs, State
from align.errors import EXIT_ALIGNED, EXIT_NOT_COMPARABLE

_COLUMNS = ("check", "state", "found", "mend")
_STYLES: dict[State, str] = {"ok": "green", "missing": "bold red", "warning": "yellow", "unknown": "magenta"}
#: Width of the columns with names and states.
_NAME, _STATE = 20, 7


def execute(device: str, json: bool) -> int:
    """Examine this machine, print every answer, and return 0 if nothing is missing, otherwise 2.

    Raises:
        UserError: a device that is not known or not supported.
    """
    check_supported(device)
    needs = Needs()
    found = examine(Machine(device=device), needs)
    if json:
        checks = list(found)
        print_json(record(device, checks, needs))
    else:
        checks = show(Console(emoji=False, highlight=False), found)
    return EXIT_NOT_COMPARABLE if _count(checks, "missing") else EXIT_ALIGNED


def record(device: str, checks: Sequence[Check], needs: Needs) -> dict[str, object]:
    """Answers, how many there are of each state, and what they were measured against."""
    return {
        "device": device,
        "missing": _count(checks, "missing"),
        "warning": _count(checks, "warning"),
        "unknown": _count(checks, "unknown"),
        "checks": [asdict(check) for check in checks],
        "needs": asdict(needs),
    }


def show(console: Console, found: Iterable[Check]) -> list[Check]:
    """Print each answer as soon as it is known, and return them all."""
    checks = []
    if not console.is_terminal:  # for a file or another program: one row a line
        checks = list(found)
        _print(columns([_COLUMNS, *((check.name, check.state, check.found, check.mend) for check in checks)]))
        return checks
    console.print(_row(*(Text(column, "bold") for column in _COLUMNS[:3])))
    for check in found:
        checks.append(check)
        console.print(_row(Text(check.name), Text(check.state, _STYLES[check.state]), Text(check.found)))
        if check.mend:  # never broken into lines, so that it can be copied
            console.print(Text.assemble("  → ", (check.mend, "bold")), soft_wrap=True)
    console.print()
    console.print(summary(checks))
    if any(check.mend.startswith("align ") for check in checks) and shutil.which("align") is None:
        console.print("align is the command whose path `make -s path` prints", style="dim")
    return checks


def _print(text: str) -> None:
    """A reader that has seen enough, such as ``head``, does not change the exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python writes what is left at its end once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def summary(checks: Sequence[Check]) -> str:
    """One sentence."""
    parts = [f"{_count(checks, state)} {state}" for state in ("missing", "warning", "unknown")]
    said = ", ".join(part for part in parts if not part.startswith("0 "))
    if _count(checks, "missing"):
        return f"{said}: run the commands above"
    return f"nothing is missing{f'; {said}' if said else ''}; next: make align MODEL=qwen3"


def _row(name: Text, state: Text, found: Text) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=_NAME)
    table.add_column(width=_STATE, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(name, state, found)
    return table


def _count(checks: Sequence[Check], state: State) -> int:
    return sum(check.state == state for check in checks)
