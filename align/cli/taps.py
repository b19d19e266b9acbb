"""``align taps``: where an engine yields each checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from adapters.probe.taps import load_taps
from align.cli.output import columns, print_json
from align.errors import EXIT_ALIGNED, UserError

_COLUMNS = ("checkpoint", "where", "pick", "transform", "inverse", "when")
_SHORT = ("checkpoint", "transform", "inverse")


def execute(engine: str, json: bool = False) -> int:
    """Print the engine's table of taps.

    Raises:
        UserError: an engine without taps.
    """
    try:
        taps = load_taps(engine)
    except ValueError as error:
        raise UserError(str(error), "align taps lmdeploy, or align taps vllm") from None
    if json:
        rows = [{column: getattr(tap, column) for column in _COLUMNS} for tap in taps]
        print_json({"engine": engine, "taps": rows})
        return EXIT_ALIGNED
    console = Console(soft_wrap=True, emoji=False, highlight=False)
    whole = columns([_COLUMNS, *([str(getattr(tap, column)) or "always" for column in _COLUMNS] for tap in taps)])
    if not console.is_terminal:  # for a file or another program: one row a line
        print(whole)
    elif max(map(len, whole.splitlines())) <= console.width:
        _print(console, whole.splitlines())
    else:  # what is long goes below
        short = columns([_SHORT, *([str(getattr(tap, column)) for column in _SHORT] for tap in taps)])
        _print(console, short.splitlines(), ["where → pick", *(f"{tap.where} → {tap.pick}" for tap in taps)])
    return EXIT_ALIGNED


def _print(console: Console, lines: Sequence[str], below: Sequence[str] = ()) -> None:
    """The first line is the heading."""
    for index, line in enumerate(lines):
        console.print(Text(line, "" if index else "bold"))
        if below:
            console.print(Text(f"    {below[index]}", "dim"))
